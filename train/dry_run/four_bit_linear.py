"""A stand-in for bitsandbytes' projections in 4 bits, with which the memory of a step is simulated without them."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from skipdecode.kernels.linear import sizes

BLOCK, BLOCKS = 64, 256  # weights with a scale of 8 bits; scales with a scale of 32 bits
TABLES = 4 * (16 + 256)  # bytes of the values that 4 and 8 bits stand for


class FourBitLinear(nn.Linear):
    """Allocates what a projection in 4 bits does, and dequantises its weight whenever it is used."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(inputs, outputs, bias=bias, dtype=dtype)
        count = inputs * outputs
        stored = -(-count // 2) + -(-count // BLOCK) + 4 * -(-count // (BLOCK * BLOCKS)) + TABLES
        self.weight = nn.Parameter(torch.empty(stored, dtype=torch.uint8), requires_grad=False)
        self.compute_dtype = dtype

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], in the input's data type."""
        size = self.out_features, self.in_features
        computed: torch.Tensor = _dequantised(hidden.to(self.compute_dtype), self.weight, self.bias, size)
        return computed.to(hidden.dtype)


class _Dequantised(torch.autograd.Function):
    """Keeps the weight in 4 bits for the backward pass, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, packed: torch.Tensor, bias: Any, size: tuple[int, int]) -> torch.Tensor:
        ctx.packed, ctx.size = packed, size
        return nn.functional.linear(hidden, packed.new_empty(size, dtype=hidden.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None, None]:
        return gradients[0] @ ctx.packed.new_empty(ctx.size, dtype=gradients[0].dtype), None, None, None


_dequantised: Any = _Dequantised.apply


def store_in_four_bits(model: PreTrainedModel) -> None:
    """Replace the projections of a model on the meta device, in place, except the LM head, as transformers does."""
    for name, module in list(model.named_modules()):
        if type(module) in (nn.Linear, Conv1D) and module is not model.get_output_embeddings():
            inputs, outputs = sizes(module)
            bias, dtype = module.bias is not None, module.weight.dtype
            model.set_submodule(name, FourBitLinear(inputs, outputs, bias=bias, dtype=dtype))
