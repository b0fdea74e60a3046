"""Layer dropout: in training, random rows of a batch bypass a layer (LayerSkip, arXiv 2404.16710, section 4.1.1)."""

from typing import Any

import torch
from torch import nn

from skipdecode.families import decoder_layers


def dropout_rates(num_layers: int, maximum: float) -> list[float]:
    """The dropout rate of each layer: 0 in the first one, rising exponentially to `maximum` in the last one.

    >>> [round(rate, 3) for rate in dropout_rates(3, 0.2)]
    [0.0, 0.083, 0.2]
    """
    return [maximum * (2 ** (layer / max(1, num_layers - 1)) - 1) for layer in range(num_layers)]


def add_layer_dropout(model: nn.Module, maximum: float) -> None:
    """Make rows bypass layers while the model is in training mode; nothing is rescaled, as in the paper.

    A row that bypasses a layer leaves it as it entered. Each row of each pass is drawn anew.

    Args:
        model: a causal language model, wrapped or not.
        maximum: see `dropout_rates`.
    """
    layers = decoder_layers(model)

    def hook_of(rate: float) -> Any:
        def bypass(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if not layer.training:
                return output
            entered = args[0] if args else kwargs["hidden_states"]  # [batch, positions, hidden]
            left = output[0] if isinstance(output, tuple) else output
            bypassed = torch.rand(len(entered), 1, 1, device=entered.device) < rate
            left = torch.where(bypassed, entered, left)
            return (left, *output[1:]) if isinstance(output, tuple) else left

        return bypass

    for layer, rate in zip(layers, dropout_rates(len(layers), maximum), strict=True):
        if rate:
            layer.register_forward_hook(hook_of(rate), with_kwargs=True)
