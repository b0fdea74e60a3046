"""Multi-layer early exit: the hidden states after every layer of one forward pass, for the head that they share."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from skipdecode import ConfigError
from skipdecode.families import decoder_layers, exit_head


@dataclass(frozen=True)
class Exits:
    """The outputs of each layer of a forward pass.

    Attributes:
        hidden: after each layer, bottom first, of the columns that predict the completion, [batch, new tokens, hidden].
        head: turns any of them into logits, [batch, new tokens, vocabulary].
    """

    hidden: tuple[torch.Tensor, ...]
    head: Callable[[torch.Tensor], torch.Tensor]


def run_exits(
    model: nn.Module,
    run: Callable[[], object],
    new_tokens: int,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Exits:
    """Record what every layer gives in one forward pass at full depth.

    Args:
        model: a causal language model, wrapped or not.
        run: the forward pass of a batch laid out in columns, through whatever wraps the model.
        new_tokens: columns of the completions.
        autocast: what the pass runs under, for the head, which is called outside of it.

    Raises:
        ConfigError: for a family whose final norm is not known; where the pass left a layer out.
    """
    layers = decoder_layers(model)
    outputs: list[torch.Tensor] = []

    def record(layer: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output  # [batch, columns, hidden]
        # Token 0 is predicted by the prompt's last column; what stands in the last column predicts nothing.
        outputs.append(hidden[:, -new_tokens - 1 : -1])  # [batch, new tokens, hidden]

    hooks = [layer.register_forward_hook(record) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    if len(outputs) != len(layers):
        raise ConfigError(
            f"{len(outputs)} of {len(layers)} layers ran: every exit has a loss in each step, so none may be dropped "
            "(model.config.layerdrop=0)"
        )
    to_logits = exit_head(model)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        with autocast():
            return to_logits(hidden)

    return Exits(tuple(outputs), head)
