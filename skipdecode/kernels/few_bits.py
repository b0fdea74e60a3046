"""Projections on a GPU with weights in 8 or 4 bits, by the Triton kernels (`skipdecode.kernels.gpu`).

Weights are rounded to the same values as on a CPU. Activations aren't rounded: a step's time is that of reading
weights.
"""

from typing import Any

import torch
import torch.nn.functional as F

from skipdecode.kernels.cpu import GROUP
from skipdecode.kernels.int8 import round_to_8_bits
from skipdecode.kernels.on_gpu import MAX_ROWS


class FewBitLinear:
    """`hidden @ weight.T + bias`; for many rows by torch's product, with weights that are restored for each call.

    Args:
        weight: [out, in].
        bias: [out] or None.
        bits: 8, with a scale for each output, or 4, with a scale for each group of 32 inputs of an output.
        kernels: the module of the kernels.

    Attributes:
        weight: int8 [out, in], or int32 [out, words] with eight weights plus 8 in a word, the first in its lowest bits.
        scale: float32 [out], or bfloat16 [out, groups].
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, bits: int, kernels: Any) -> None:
        rounded, self.scale = (round_to_8_bits if bits == 8 else round_to_4_bits)(weight.detach().float().contiguous())
        self.weight = rounded
        if bits == 4:
            low, high = (rounded[:, start::2] + 8 for start in (0, 1))
            self.weight = (low | high << 4).view(torch.int32)
        self.bias = bias
        self._kernels = kernels

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out]."""
        with torch.cuda.device_of(hidden):
            if len(hidden) > MAX_ROWS:
                weight = self._kernels.restore(self.weight, self.scale, hidden.shape[1], hidden.dtype)
                return F.linear(hidden, weight, self.bias)
            projected: torch.Tensor = self._kernels.project(
                hidden.contiguous(), [self.weight], [self.bias], scales=[self.scale]
            )
            return projected


def round_to_4_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [out, in] as integers of -8 to 7, and a bfloat16 scale for each group of 32 inputs [out, groups].

    The value of a group with the largest magnitude becomes -8, so that all 16 values are used. Inputs are padded to
    whole groups.
    """
    groups = F.pad(weight, (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    scale = (largest / -8).bfloat16()  # [out, groups, 1]
    steps = torch.where(scale == 0, 0.0, groups / scale.float()).round().clamp(-8, 7)
    return steps.to(torch.int8).flatten(1), scale[..., 0]
