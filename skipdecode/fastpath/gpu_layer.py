"""A decoder layer's decode step as seven Triton kernels (`skipdecode.kernels.gpu`), or five for a single row.

Sums are taken in another order than torch's products take them, so where two tokens are nearly as likely the other one
may be chosen.
"""

import functools
import warnings
from types import ModuleType
from typing import Any

import torch

from skipdecode.fastpath.cpu_steps import ACTIVATIONS
from skipdecode.fastpath.kv_cache import PlannedLayer
from skipdecode.fastpath.layer import LeanBlock, Norm, StepInputs
from skipdecode.kernels.linear import weight_of

MOST_FUSED = 32  # rows of a step: of more, products are no longer bound by reading weights
_SHARED_MEMORY = 96 * 1024  # bytes of a program, for the largest tiles
_TYPES = (torch.bfloat16, torch.float16)  # float32 is for those who check, and torch's products are exact there


class FusedBlock:
    """A `LeanBlock` for which `fused_blocks` has no objection, the kernels that run it, and their `arrivals`."""

    def __init__(self, block: LeanBlock, kernels: Any, arrived: torch.Tensor) -> None:
        self._block = block
        self._kernels = kernels
        self._arrived = arrived
        sources = {**block.sources, "up": [*block.sources["gate"], *block.sources["up"]]}
        # name -> weights and biases of what is projected together
        self._parts = {
            name: ([weight_of(part) for part in parts], [part.bias for part in parts])
            for name, parts in sources.items()
        }
        self._activation = ACTIVATIONS[block.activation_name]

    def __call__(
        self, hidden: torch.Tensor, cached: PlannedLayer, inputs: StepInputs, column: torch.Tensor
    ) -> torch.Tensor:
        """Run the layer on `hidden` [rows, hidden], whose tokens have the column `column` [1]."""
        block, keys, values = self._block, cached.keys, cached.values
        assert keys is not None
        assert values is not None
        qkv = self._project("qkv", hidden, block.attention_norm if block.norm_first else None)
        attended = self._kernels.attend(
            qkv,
            keys,
            values,
            column,
            heads=block.heads,
            kv_heads=block.kv_heads,
            interleaved=block.interleaved,
            scale=block.scaling,
            bias=inputs.bias,
            rotary=inputs.rotary,
        )
        after = self._project("out", attended, residual=hidden)
        if not block.norm_first:
            after = self._kernels.normalise(after, block.attention_norm)
            result: torch.Tensor = self._kernels.normalise(self._feed_forward(after, None, after), block.mlp_norm)
            return result
        norm = block.mlp_norm or block.attention_norm  # Phi has one for both halves
        return self._feed_forward(hidden if block.parallel else after, norm, after)

    def _feed_forward(self, hidden: torch.Tensor, norm: Norm | None, residual: torch.Tensor) -> torch.Tensor:
        gated = self._block.gate is not None
        inner = self._project("up", hidden, norm, activation=self._activation, gated=gated)
        return self._project("down", inner, residual=residual)

    def _project(self, name: str, hidden: torch.Tensor, norm: Norm | None = None, **how: Any) -> torch.Tensor:
        if norm is not None and len(hidden) > 1:  # each program would make the norms of all rows
            hidden, norm = self._kernels.normalise(hidden, norm), None
        how |= {"norm": norm, "arrived": self._arrived}
        projected: torch.Tensor = self._kernels.project(hidden, *self._parts[name], **how)
        return projected


def fused_blocks(blocks: list[Any], dtype: torch.dtype, device: torch.device) -> list[FusedBlock] | None:
    """All layers of a model for steps of few rows, one at a time; None where no device can, or a layer is another."""
    kernels = _kernels_on(device) if device.type == "cuda" and dtype in _TYPES else None
    if kernels is None or not all(_can_fuse(block, dtype) for block in blocks):
        return None
    arrived = kernels.arrivals(device)
    return [FusedBlock(block, kernels, arrived) for block in blocks]


def _can_fuse(block: LeanBlock, dtype: torch.dtype) -> bool:
    plain = block.window is None and block.query_norm is None and block.activation_name in ACTIVATIONS
    norms = [norm for norm in (block.attention_norm, block.mlp_norm) if norm is not None]
    together = [block.sources["qkv"], block.sources["gate"] + block.sources["up"]]
    alike = all(
        len({(weight_of(p).stride(), getattr(p, "bias", None) is None) for p in parts}) == 1 for parts in together
    )
    tensors = [weight_of(part) for parts in block.sources.values() for part in parts]
    return (
        plain
        and alike
        and all(norm.weight is not None for norm in norms)
        and all(tensor.dtype == dtype for tensor in tensors)
    )


@functools.cache
def triton_kernels() -> ModuleType | None:
    """The module of the kernels, which comes with torch's builds for CUDA; None where there is none."""
    try:
        from skipdecode.kernels import gpu as kernels
    except ImportError:
        return None
    return kernels


@functools.cache
def _kernels_on(device: torch.device) -> ModuleType | None:
    """The kernels, where a device can run them: one of NVIDIA's of capability 8.0 or more, with that shared memory.

    Triton compiles as it first launches, which takes a C compiler; where that fails a warning says so, once.
    """
    kernels = triton_kernels()
    if kernels is None or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    memory = properties.shared_memory_per_block_optin
    if torch.cuda.get_device_capability(device) < (8, 0) or memory < _SHARED_MEMORY:
        return None
    try:
        with torch.cuda.device(device):
            rows = torch.zeros(MOST_FUSED, 2048, dtype=torch.float16, device=device)
            for count in (1, 16, MOST_FUSED):  # a kernel each, with the most memory that it asks for
                kernels.project(rows[:count], [rows], [None], arrived=kernels.arrivals(device))
            torch.cuda.synchronize()
    except Exception as error:  # of Triton, of the compiler that it calls, of the driver
        warnings.warn(f"decode steps go without their own kernels, which don't run here: {error}", stacklevel=2)
        return None
    return kernels
