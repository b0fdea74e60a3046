"""Multi-layer early exit: the hidden states after every layer of one forward pass, and the LM head that they share."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from skipdecode.errors import ConfigError
from skipdecode.families import decoder_layers, exit_head


@dataclass(frozen=True)
class Exits:
    """The outputs of every layer in a forward pass.

    Attributes:
        hidden: the states after each layer, bottom first, at the positions that predict the completion, each
            [batch, new tokens, hidden].
        head: computes logits from any of them, [batch, new tokens, vocabulary].
    """

    hidden: tuple[torch.Tensor, ...]
    head: Callable[[torch.Tensor], torch.Tensor]


def run_exits(
    model: nn.Module,
    run: Callable[[], object],
    new_tokens: int,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Exits:
    """Record the output of every layer in one full-depth forward pass.

    Args:
        model: a causal language model, wrapped or not.
        run: runs the forward pass of a collated batch, through any wrapper of the model.
        new_tokens: length of the completions.
        autocast: makes the pass's precision context for the head, which is called after the pass.

    Raises:
        ConfigError: for a family whose final norm isn't known, and where the pass skipped a layer.
    """
    layers = decoder_layers(model)
    outputs: list[torch.Tensor] = []

    def record(layer: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output  # [batch, positions, hidden]
        # The last prompt position predicts token 0, and the last position predicts nothing.
        outputs.append(hidden[:, -new_tokens - 1 : -1])  # [batch, new tokens, hidden]

    hooks = [layer.register_forward_hook(record) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    if len(outputs) != len(layers):
        raise ConfigError(
            f"only {len(outputs)} of {len(layers)} layers ran, but each one has an exit whose loss is needed (set "
            "model.config.layerdrop=0)"
        )
    to_logits = exit_head(model)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        with autocast():
            return to_logits(hidden)

    return Exits(tuple(outputs), head)
