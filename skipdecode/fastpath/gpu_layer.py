"""A decoder layer's decode step as seven Triton kernels (`skipdecode.kernels.gpu`), or five for a single row.

The kernels add up in another order than torch's matrix products do. So where two tokens are nearly equally likely, the
other one may be chosen.
"""

from collections.abc import Sequence
from typing import Any

import torch

from skipdecode.fastpath.cpu_steps import ACTIVATIONS
from skipdecode.fastpath.kv_cache import PlannedLayer
from skipdecode.fastpath.layer import FastLayer, Norm
from skipdecode.fastpath.step_inputs import StepInputs
from skipdecode.kernels import on_gpu
from skipdecode.kernels.few_bits import FewBitLinear
from skipdecode.kernels.linear import weight_of


class GpuLayer:
    """A `FastLayer` by kernels of its own.

    Args:
        layer: one that the kernels support.
        arrived: the kernels' `arrivals`, which all layers of a model share.
    """

    def __init__(self, layer: FastLayer, kernels: Any, arrived: torch.Tensor) -> None:
        self._layer = layer
        self._kernels = kernels
        self._arrived = arrived
        sources = {**layer.sources, "up": [*layer.sources["gate"], *layer.sources["up"]]}
        if isinstance(layer.out, FewBitLinear):  # then queries, keys and values are one projection
            gate = [] if layer.gate is None else [layer.gate]
            sources = {"qkv": [layer.qkv], "out": [layer.out], "up": [*gate, layer.up], "down": [layer.down]}
        # The weights, biases and scales of what is projected together, by the names of the parts.
        self._parts = {name: _read(parts) for name, parts in sources.items() if parts}
        self._activation = ACTIVATIONS[layer.activation_name]

    def __call__(self, hidden: torch.Tensor, cached: PlannedLayer, inputs: StepInputs) -> torch.Tensor:
        """Run the layer on `hidden` [rows, hidden], where the `attend` of `inputs` runs a kernel too."""
        layer = self._layer
        qkv = self._project("qkv", hidden, layer.attention_norm if layer.norm_first else None)
        query, key, value = self._kernels.split_heads(qkv, layer.heads, layer.kv_heads, interleaved=layer.interleaved)
        attended = inputs.attend(layer, cached, query, key, value, inputs.rotary)
        after = self._project("out", attended, residual=hidden)
        if not layer.norm_first:
            after = self._kernels.normalise(after, layer.attention_norm)
            result: torch.Tensor = self._kernels.normalise(self._feed_forward(after, None, after), layer.mlp_norm)
            return result
        norm = layer.mlp_norm or layer.attention_norm  # Phi has one for both halves
        return self._feed_forward(hidden if layer.parallel else after, norm, after)

    def _feed_forward(self, hidden: torch.Tensor, norm: Norm | None, residual: torch.Tensor) -> torch.Tensor:
        gated = self._layer.gate is not None
        inner = self._project("up", hidden, norm, activation=self._activation, gated=gated)
        return self._project("down", inner, residual=residual)

    def _project(self, name: str, hidden: torch.Tensor, norm: Norm | None = None, **how: Any) -> torch.Tensor:
        if norm is not None and len(hidden) > 1:  # else each program would normalise all rows
            hidden, norm = self._kernels.normalise(hidden, norm), None
        weights, biases, scales = self._parts[name]
        how |= {"norm": norm, "arrived": self._arrived, "scales": scales}
        projected: torch.Tensor = self._kernels.project(hidden, weights, biases, **how)
        return projected


def _read(parts: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor]]:
    """The weights, biases and scales of projections; no scales of weights that are the model's own."""
    biases, few = [part.bias for part in parts], isinstance(parts[0], FewBitLinear)
    return [part.weight if few else weight_of(part) for part in parts], biases, [part.scale for part in parts if few]


def gpu_layers(layers: Sequence[FastLayer], dtype: torch.dtype, device: torch.device) -> list[GpuLayer] | None:
    """All layers of a model by kernels of their own; None where the device or one of the layers isn't supported."""
    kernels = on_gpu.kernels_on(device) if dtype in on_gpu.HALF_PRECISION else None
    if kernels is None or not all(_supported(layer, dtype) for layer in layers):
        return None
    arrived = kernels.arrivals(device)
    return [GpuLayer(layer, kernels, arrived) for layer in layers]


def _supported(layer: FastLayer, dtype: torch.dtype) -> bool:
    plain = layer.window is None and layer.query_norm is None and layer.activation_name in ACTIVATIONS
    norms = [norm for norm in (layer.attention_norm, layer.mlp_norm) if norm is not None]
    together = [layer.sources["qkv"], layer.sources["gate"] + layer.sources["up"]]
    alike = all(
        len({(weight_of(p).stride(), getattr(p, "bias", None) is None) for p in parts}) == 1 for parts in together
    )
    tensors = [weight_of(part) for parts in layer.sources.values() for part in parts]
    return (
        plain
        and alike
        and all(norm.weight is not None for norm in norms)
        and all(tensor.dtype == dtype for tensor in tensors)
    )
