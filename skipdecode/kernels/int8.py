"""Projections with 8-bit weights and activations, on CPU.

The time of a decode step is bound by reading weights, and 8 bits are half of bfloat16. The operators are oneDNN's,
which torch's quantised export uses on x86 (`torch.ops.onednn`). On a processor with int8 dot products (AVX512-VNNI,
AVX-VNNI, AMX) they also compute faster than floating point.
"""

from functools import cache
from typing import Any

import torch

from skipdecode.internals import int8_linear_operator, pack_int8

_TINY = 1e-30  # in place of 0 as the largest value of a row, which is divided by
_FEW_ROWS = 64  # up to here the time depends on the number of operators, beyond it on passes over memory
_ROUNDED_TOGETHER = 2**17  # values: half a megabyte of float32, which stays in a core's cache between passes


class Int8Linear:
    """`hidden @ weight.T + bias` in integers, on CPU.

    Weights are rounded once, with a scale for each output (symmetric, absmax). Activations are rounded in each call,
    with a scale for each row, so that a row gives the same result in any batch.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        rounded, scale = round_to_8_bits(weight.detach().float())
        # Where products of 127 overflow, weights are split into two halves, whose products are added.
        parts = [rounded >> 1, rounded - (rounded >> 1)] if overflows() else [rounded]
        self._weights = [pack_int8(part.contiguous()) for part in parts]  # packing ignores strides
        self._scale = scale
        self._zero_point = torch.zeros(len(scale), dtype=torch.int32)
        self._bias = torch.zeros(1, dtype=torch.float32) if bias is None else bias.detach().float()
        # 0 is stored as 128; the half turns truncation into rounding.
        self._middle = torch.tensor(128.5, dtype=torch.float32)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out], in the type of `hidden`."""
        few = len(hidden) <= _FEW_ROWS
        rounded, scale = self._round_few(hidden) if few else _round_many(hidden)
        product, *others = [_multiply(rounded, weight, self._scale, self._zero_point) for weight in self._weights]
        for other in others:
            product += other
        if few:
            return torch.addcmul(self._bias, product, scale).to(hidden.dtype)
        return product.mul_(scale).add_(self._bias).to(hidden.dtype)

    def _round_few(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [rows, in] in 8 bits, and the scale of each row [rows, 1]."""
        exact = hidden.float()
        scale = torch.linalg.vector_norm(exact, float("inf"), dim=1, keepdim=True).mul_(1 / 127).clamp_(min=_TINY)
        return torch.addcdiv(self._middle, exact, scale).to(torch.uint8), scale


@cache
def overflows() -> bool:
    """Whether oneDNN adds two 8-bit products in 16 bits, in which 2 * 255 * 127 doesn't fit.

    It does so on processors with AVX2 and no int8 dot products, without an error.
    """
    largest = pack_int8(torch.full((16, 64), 127, dtype=torch.int8))
    scale = torch.ones(16, dtype=torch.float32)
    product = _multiply(torch.full((1, 64), 255, dtype=torch.uint8), largest, scale, torch.zeros(16, dtype=torch.int32))
    return bool((product != 64 * (255 - 128) * 127).any())


def _multiply(
    rounded: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor
) -> torch.Tensor:
    """Products [rows, out] of rows in unsigned bytes, in which 0 is stored as 128, with packed weights."""
    no_post_op: list[Any] = []
    product: torch.Tensor = int8_linear_operator()(
        rounded, 1.0, 128, weight, scale, zero_point, None, 1.0, 0, torch.float32, "none", no_post_op, ""
    )
    return product


def round_to_8_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [out, in] in int8, and the scale of each output [out]."""
    scale = (weight.abs().amax(dim=1) / 127).clamp(min=_TINY)
    return torch.round(weight / scale[:, None]).to(torch.int8), scale


def _round_many(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_round_few`, with more operators that are faster on many values, a few rows at a time."""
    rounded = torch.empty(hidden.shape, dtype=torch.uint8)
    scale = torch.empty(len(hidden), 1, dtype=torch.float32)
    rows = max(1, _ROUNDED_TOGETHER // hidden.shape[1])
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        exact = hidden[part].to(torch.float32, copy=True)
        largest = torch.maximum(exact.amax(dim=1, keepdim=True), -exact.amin(dim=1, keepdim=True)).clamp_(min=_TINY)
        # By way of signed bytes: torch vectorises that conversion, and not the one to unsigned bytes.
        rounded[part] = exact.mul_(127 / largest).round_().to(torch.int8).view(torch.uint8).bitwise_xor_(128)
        scale[part] = largest
    return rounded, scale.mul_(1 / 127)
