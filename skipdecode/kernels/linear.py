"""The projections of the fast path, with a model's own weights, packed copies, or copies in 8 or 4 bits."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from skipdecode.internals import has_bfloat16_on_cpu, pack, packed_linear_operator
from skipdecode.kernels import on_gpu
from skipdecode.kernels.cpu import NativeLinear, kernels
from skipdecode.kernels.few_bits import FewBitLinear
from skipdecode.kernels.int8 import Int8Linear

Weights = Literal["model", "packed", "int8", "int4", "int4-int8-head", "int8-int4-head"]
Linear: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # [rows, in] -> [rows, out]

# Projections of queries, keys and values with up to this many weights in all are copied into one, which saves calls.
# The time of larger ones is bound by reading the weights, and the copy would only cost memory.
FUSE_BELOW = 2**22


def sizes(projection: nn.Module) -> tuple[int, int]:
    """The numbers of inputs and outputs of a projection."""
    weight: Any = projection.weight
    rows, columns = weight.shape
    return (rows, columns) if isinstance(projection, Conv1D) else (columns, rows)


def weight_of(projection: Any) -> torch.Tensor:
    """The weight [out, in] of a projection; Conv1D stores it transposed."""
    weight: torch.Tensor = projection.weight.detach()
    return weight.T if isinstance(projection, Conv1D) else weight


def plain_linear(projection: Any) -> Linear:
    """A projection with the module's own weights, without the overhead of calling a module."""
    return functools.partial(F.linear, weight=weight_of(projection), bias=projection.bias)


def packed_linear(projection: Any) -> Linear:
    """A projection with a copy of its weights in blocks: in float32 those of the compiled kernels, else oneDNN's."""
    if kernels() is not None and projection.weight.dtype == torch.float32:
        return NativeLinear(weight_of(projection), projection.bias)
    if projection.weight.dtype == torch.bfloat16 and not has_bfloat16_on_cpu():
        return plain_linear(
            projection
        )  # oneDNN has no bfloat16 layout there; the compiled kernels read the model's own weights
    # oneDNN chooses the layout for a number of rows: that for 8 was as fast for a single row, and faster for more.
    weight = pack(weight_of(projection).contiguous(), rows=8)
    bias, run, no_scalars = projection.bias, packed_linear_operator(), []  # type: ignore[var-annotated]
    return lambda hidden: run(hidden, weight, bias, "none", no_scalars, "")


def int8_linear(projection: Any) -> Linear:
    """A projection with 8-bit weights, on a CPU by the compiled kernels where there are any, else by oneDNN."""
    weight, bias, on_device = weight_of(projection), projection.bias, on_gpu.kernels_on(projection.weight.device)
    if on_device is not None:
        return FewBitLinear(weight, bias, 8, on_device)
    return NativeLinear(weight, bias, "int8") if kernels() is not None else Int8Linear(weight, bias)


def int4_linear(projection: Any) -> Linear:
    """A projection with 4-bit weights, by the kernels for its device."""
    weight, bias, on_device = weight_of(projection), projection.bias, on_gpu.kernels_on(projection.weight.device)
    return NativeLinear(weight, bias, "int4") if on_device is None else FewBitLinear(weight, bias, 4, on_device)


def project_together(projections: Sequence[nn.Module], make_linear: Callable[..., Linear]) -> Linear:
    """Queries, keys and values from one call: [rows, in] -> [rows, sum of outs]."""
    if len(projections) == 1:
        return make_linear(projections[0])
    inputs, outputs = sizes(projections[0])[0], sum(sizes(p)[1] for p in projections)
    if make_linear is plain_linear and inputs * outputs > FUSE_BELOW:
        singles = [make_linear(projection) for projection in projections]
        return lambda hidden: torch.cat([single(hidden) for single in singles], dim=-1)
    with torch.device("meta"):
        fused = nn.Linear(inputs, outputs, bias=projections[0].bias is not None)
    fused.weight = nn.Parameter(torch.cat([weight_of(p) for p in projections]), requires_grad=False)
    if fused.bias is not None:
        biases: list[Any] = [p.bias for p in projections]
        fused.bias = nn.Parameter(torch.cat([bias.detach() for bias in biases]), requires_grad=False)
    return make_linear(fused)


def project_apart(
    projections: Sequence[nn.Module], make_linear: Callable[..., Linear], queries: int
) -> tuple[Linear, Linear] | None:
    """One call for the queries, which are the first outputs, and one for keys and values; None for copied weights."""
    if make_linear is not plain_linear:
        return None
    if len(projections) == 1:
        weight, bias = weight_of(projections[0]), cast(torch.Tensor | None, projections[0].bias)
        biases = (None, None) if bias is None else (bias[:queries], bias[queries:])
        query_only = functools.partial(F.linear, weight=weight[:queries], bias=biases[0])
        return query_only, functools.partial(F.linear, weight=weight[queries:], bias=biases[1])
    query, key, value = (plain_linear(projection) for projection in projections)
    return query, lambda hidden: torch.cat([key(hidden), value(hidden)], dim=-1)


MAKERS: dict[Weights, Callable[[Any], Linear]] = {
    "model": plain_linear,
    "packed": packed_linear,
    "int8": int8_linear,
    "int4": int4_linear,
    "int4-int8-head": int4_linear,
    "int8-int4-head": int8_linear,
}
HEAD_MAKERS = {**MAKERS, "int4-int8-head": int8_linear, "int8-int4-head": int4_linear}
