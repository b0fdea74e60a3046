"""The operations of a decode step as Triton kernels, which load weights before the kernel before them has ended.

A step of few rows reads each weight once and computes little, so that its time is that of reading memory. But memory is
idle between two kernels: one ends, the next one starts, and only then does it load weights. Hopper can start a kernel
while the one before still runs (programmatic dependent launch). Each kernel here first loads its first weights and then
waits for the result of the one before (`gdc_wait`). Attention is in `skipdecode.kernels.gpu_attention`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from skipdecode.kernels import gpu_device
from skipdecode.kernels.gpu_attention import QUERY_BLOCK, attend, attend_in_prompts, split_heads, write

try:  # transformers refuses code of a checkpoint that imports a missing package outside of a try
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    raise

__all__ = [
    "QUERY_BLOCK",
    "arrivals",
    "attend",
    "attend_in_prompts",
    "normalise",
    "project",
    "restore",
    "split_heads",
    "write",
]  # fmt: skip

# Programs of a projection that a processor runs at once, at most: as many as registers suffice for, and as `arrivals`
# has counters for.
PER_PROCESSOR = 4


@triton.jit
def _activate(x, KIND: tl.constexpr):
    """An activation, by its number in `skipdecode.fastpath.cpu_steps.ACTIVATIONS`; 0 for none."""
    if KIND == 1:
        x = tl.maximum(x, 0.0)
    elif KIND == 2:
        x = x / (1 + tl.exp(-x))
    elif KIND == 3:
        x = x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))  # 0.5 x (1 + tanh(...))
    elif KIND == 4:
        x = 0.5 * x * (1 + tl.math.erf(x * 0.7071067811865476))
    return x


@triton.jit
def _find_part(w0, w1, w2, b0, b1, b2, n0, n1, n2, PARTS: tl.constexpr, BN: tl.constexpr):
    """This program's part of up to three projections: its outputs, its weight and bias, and where its outputs go."""
    block = tl.program_id(0)
    weight, bias, outputs, first = w0, b0, n0, 0
    if PARTS > 1:
        blocks = tl.cdiv(n0, BN)
        if block >= blocks:
            block -= blocks
            blocks = tl.cdiv(n1, BN)
            weight, bias, outputs, first = w1, b1, n1, n0
            if block >= blocks:
                block -= blocks
                weight, bias, outputs, first = w2, b2, n2, n0 + n1
    return block * BN + tl.arange(0, BN), weight, bias, outputs, first


@triton.jit
def _load(weight, n, mask, at, end, stride_n, stride_k):
    """Weights of outputs n, as they are stored, with the numbers `at` of a row's values up to `end`."""
    mask = mask[:, None] & (at < end)[None, :]
    return tl.load(weight + n[:, None] * stride_n + at[None, :] * stride_k, mask=mask, other=0)


@triton.jit
def _load_scales(
    scales, n, mask, begin, K: tl.constexpr, BITS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The scales of what `_load` found: of outputs [BN] in 8 bits, of groups of 32 inputs [BN, groups] in 4, else 1."""
    if BITS == 4:
        group = begin // 32 + tl.arange(0, BK // 32)
        groups: tl.constexpr = (K + 31) // 32
        mask = mask[:, None] & (group < groups)[None, :]
        found = tl.load(scales + n[:, None] * groups + group[None, :], mask=mask, other=0.0).to(tl.float32)
    elif BITS == 8:
        found = tl.load(scales + n, mask=mask, other=0.0)
    else:
        found = tl.full((BN,), 1.0, tl.float32)
    return found


@triton.jit
def _unpack(words):
    """The numbers 0 to 15 of words [outputs, words], times 1, 16, 256 and 4096 in turn [outputs, inputs].

    Where they are in the word they aren't moved, which would take another instruction for each.
    """
    upper = words >> 16
    even = tl.interleave(tl.interleave(words & 15, upper & 15), tl.interleave(words & 3840, upper & 3840))
    odd = tl.interleave(tl.interleave(words & 240, upper & 240), tl.interleave(words & 61440, upper & 61440))
    return tl.interleave(even, odd).to(tl.float32)


@triton.jit
def _powers(BK: tl.constexpr):
    """1, 1/16, 1/256 and 1/4096 in turn, by their exponents."""
    return ((127 - tl.arange(0, BK) % 4 * 4) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _restore(stored, scales, TYPE: tl.constexpr, BITS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The weights that `_load` found; in 8 bits without their scales, by which outputs are multiplied."""
    if BITS == 4:
        grouped = tl.reshape(_unpack(stored) * _powers(BK)[None, :] - 8, (BN, BK // 32, 32))
        stored = tl.reshape(grouped * scales[:, :, None], (BN, BK))
    return stored.to(TYPE)


@triton.jit
def _multiply(stored, scales, row, BITS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Products of a row of inputs with the weights that `_load` found: [outputs]."""
    if BITS == 4:
        products = _unpack(stored) * (row * _powers(BK))[None, :]
        of_groups = tl.sum(tl.reshape(products, (BN, BK // 32, 32)), 2)
        of_groups -= 8 * tl.sum(tl.reshape(row, (BK // 32, 32)), 1)[None, :]
        found = tl.sum(of_groups * scales, 1)
    else:
        found = tl.sum(stored.to(tl.float32) * row[None, :], 1)
        if BITS == 8:
            found *= scales
    return found


@triton.jit
def _project_row(
    x, out, residual, w0, w1, w2, b0, b1, b2, s0, s1, n0, n1, n2, scale, shift, eps, K: tl.constexpr, stride_n,
    stride_k, ACTIVATION: tl.constexpr, GATED: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, NORM: tl.constexpr, HAS_SHIFT: tl.constexpr, BITS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row: whole rows of a weight are loaded before it is ready. NORM is 1 for RMSNorm, 2 for LayerNorm."""
    n, weight, bias, outputs, first = _find_part(w0, w1, w2, b0, b1, b2, n0, n1, n2, PARTS, BN)
    n_mask = n < outputs
    k = tl.arange(0, BK)
    k_mask = k < K
    TOGETHER: tl.constexpr = 8 if BITS == 4 else 1  # weights in a value of memory
    stored, stored_end = tl.arange(0, BK // TOGETHER), (K + TOGETHER - 1) // TOGETHER
    tile = _load(weight, n, n_mask, stored, stored_end, stride_n, stride_k)
    scales = _load_scales(s0, n, n_mask, 0, K, BITS, BN, BK)
    if GATED:
        gated = _load(w1, n, n_mask, stored, stored_end, stride_n, stride_k)
        scales_up = _load_scales(s1, n, n_mask, 0, K, BITS, BN, BK)
    if HAS_BIAS:
        added = tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)
        if GATED:
            added_up = tl.load(b1 + n, mask=n_mask, other=0.0).to(tl.float32)
    if NORM > 0:
        factors = tl.load(scale + k, mask=k_mask, other=0.0).to(tl.float32)
        if HAS_SHIFT:
            shifts = tl.load(shift + k, mask=k_mask, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(x + k, mask=k_mask, other=0.0).to(tl.float32)
    if NORM > 0:
        if NORM == 2:
            row = tl.where(k_mask, row - tl.sum(row) / K, 0.0)
        row *= tl.rsqrt(tl.sum(row * row) / K + eps) * factors
        if HAS_SHIFT:
            row += shifts
        row = row.to(x.dtype.element_ty).to(tl.float32)
    total = _multiply(tile, scales, row, BITS, BN, BK)
    if HAS_BIAS:
        total += added
    total = _activate(total, ACTIVATION)
    if GATED:
        up = _multiply(gated, scales_up, row, BITS, BN, BK)
        if HAS_BIAS:
            up += added_up
        total *= up
    if HAS_RESIDUAL:
        total += tl.load(residual + n, mask=n_mask, other=0.0).to(tl.float32)
    tl.store(out + first + n, total.to(out.dtype.element_ty), mask=n_mask)


@triton.jit
def _finish(
    total, up, out, residual, bias, bias_up, n, n_mask, m, rows, first, width, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Apply bias, activation, gate and residual to projections [outputs, rows], and store the result."""
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    total = _activate(total, ACTIVATION)
    if GATED:
        if HAS_BIAS:
            up += tl.load(bias_up + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
        total *= up
    place = m[None, :] * width + (first + n)[:, None]
    mask = (m < rows)[None, :] & n_mask[:, None]
    if HAS_RESIDUAL:
        total += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _project_small(
    x, out, residual, w0, w1, w2, b0, b1, b2, s0, s1, n0, n1, n2, rows, width, K: tl.constexpr, stride_n, stride_k,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Few rows of a small weight: each warp has one of SPLITS parts of the inputs, and weights are prefetched."""
    n, weight, bias, outputs, first = _find_part(w0, w1, w2, b0, b1, b2, n0, n1, n2, PARTS, BN)
    n_mask = n < outputs
    m = tl.arange(0, BM)
    at = tl.arange(0, SPLITS)[:, None] * BK + tl.arange(0, BK)[None, :]  # [splits, inputs]
    across = n[None, :, None] * stride_n
    mask = n_mask[None, :, None] & (at < K)[:, None, :]
    tile = tl.load(weight + across + at[:, None, :] * stride_k, mask=mask, other=0.0)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros((SPLITS, BN, BM), dtype=tl.float32)
    acc_up = tl.zeros((SPLITS, BN, BM), dtype=tl.float32)
    for start in tl.range(0, K, SPLITS * BK, num_stages=STAGES):
        here = start + at
        after = here + SPLITS * BK
        mask = n_mask[None, :, None] & (after < K)[:, None, :]
        following = tl.load(weight + across + after[:, None, :] * stride_k, mask=mask, other=0.0)
        seen = (m < rows)[None, None, :] & (here < K)[:, :, None]
        states = tl.load(x + m[None, None, :] * K + here[:, :, None], mask=seen, other=0.0)  # [splits, inputs, rows]
        acc = tl.dot(tile, states, acc)
        if GATED:
            mask = n_mask[None, :, None] & (here < K)[:, None, :]
            gated = tl.load(w1 + across + here[:, None, :] * stride_k, mask=mask, other=0.0)
            acc_up = tl.dot(gated, states, acc_up)
        tile = following
    _finish(
        tl.sum(acc, 0), tl.sum(acc_up, 0), out, residual, bias, b1, n, n_mask, m, rows, first, width, ACTIVATION, GATED,
        HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


@triton.jit
def _project(
    x, out, residual, partial, arrived, w0, w1, w2, b0, b1, b2, s0, s1, n0, n1, n2, rows, width, K: tl.constexpr,
    stride_n, stride_k, ACTIVATION: tl.constexpr, GATED: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SHARES: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Several rows: SHARES programs have a part of the inputs each, and the last one to finish adds them up."""
    n, weight, bias, outputs, first = _find_part(w0, w1, w2, b0, b1, b2, n0, n1, n2, PARTS, BN)
    n_mask = n < outputs
    m = tl.arange(0, BM)
    SPAN: tl.constexpr = ((K + SHARES * BK - 1) // (SHARES * BK)) * BK
    begin = tl.program_id(1) * SPAN
    end = tl.minimum(K, begin + SPAN)
    at = begin + tl.arange(0, BK)
    TOGETHER: tl.constexpr = 8 if BITS == 4 else 1  # weights in a value of memory
    stored, stored_end = begin // TOGETHER + tl.arange(0, BK // TOGETHER), (end + TOGETHER - 1) // TOGETHER
    tile = _load(weight, n, n_mask, stored, stored_end, stride_n, stride_k)
    if GATED:
        gated = _load(w1, n, n_mask, stored, stored_end, stride_n, stride_k)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    TYPE: tl.constexpr = x.dtype.element_ty
    seen = (m < rows)[None, :] & (at < end)[:, None]
    states = tl.load(x + m[None, :] * K + at[:, None], mask=seen, other=0.0)  # [inputs, rows]
    scales = _load_scales(s0, n, n_mask, begin, K, BITS, BN, BK)
    acc = tl.dot(_restore(tile, scales, TYPE, BITS, BN, BK), states)
    acc_up = tl.zeros((BN, BM), dtype=tl.float32)
    if GATED:
        scales_up = _load_scales(s1, n, n_mask, begin, K, BITS, BN, BK)
        acc_up = tl.dot(_restore(gated, scales_up, TYPE, BITS, BN, BK), states)
    for start in tl.range(BK, SPAN, BK, num_stages=STAGES):
        here = start + at
        tile = _load(weight, n, n_mask, start // TOGETHER + stored, stored_end, stride_n, stride_k)
        seen = (m < rows)[None, :] & (here < end)[:, None]
        states = tl.load(x + m[None, :] * K + here[:, None], mask=seen, other=0.0)
        scales = _load_scales(s0, n, n_mask, begin + start, K, BITS, BN, BK)
        acc = tl.dot(_restore(tile, scales, TYPE, BITS, BN, BK), states, acc)
        if GATED:
            gated = _load(w1, n, n_mask, start // TOGETHER + stored, stored_end, stride_n, stride_k)
            scales_up = _load_scales(s1, n, n_mask, begin + start, K, BITS, BN, BK)
            acc_up = tl.dot(_restore(gated, scales_up, TYPE, BITS, BN, BK), states, acc_up)
    is_last = True
    if SHARES > 1:
        place = tl.program_id(0) * SHARES * BN * BM + tl.arange(0, BN)[:, None] * BM + m[None, :]
        tl.store(partial + place + tl.program_id(1) * BN * BM, acc)
        tl.debug_barrier()  # all threads write before the program counts as finished
        is_last = tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") == SHARES - 1
    if is_last:
        if SHARES > 1:
            acc = tl.zeros((BN, BM), dtype=tl.float32)
            for share in tl.static_range(SHARES):  # always in the same order, for the same rounding
                acc += tl.load(partial + place + share * BN * BM, cache_modifier=".cg")
            tl.store(arrived + tl.program_id(0), 0)
        if BITS == 8:
            acc *= _load_scales(s0, n, n_mask, 0, K, BITS, BN, BK)[:, None]
            if GATED:
                acc_up *= _load_scales(s1, n, n_mask, 0, K, BITS, BN, BK)[:, None]
        _finish(
            acc, acc_up, out, residual, bias, b1, n, n_mask, m, rows, first, width, ACTIVATION, GATED, HAS_BIAS,
            HAS_RESIDUAL,
        )  # fmt: skip


@triton.jit
def _write_restored(
    weight, scales, out, outputs, K: tl.constexpr, stride_n, BITS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write a tile of weights in the type of `out`."""
    n, begin = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BK
    n_mask, k = n < outputs, begin + tl.arange(0, BK)
    scale = _load_scales(scales, n, n_mask, begin, K, BITS, BN, BK)
    TOGETHER: tl.constexpr = 8 if BITS == 4 else 1
    stored = begin // TOGETHER + tl.arange(0, BK // TOGETHER)
    tile = _load(weight, n, n_mask, stored, (K + TOGETHER - 1) // TOGETHER, stride_n, 1)
    found = _restore(tile, scale, tl.float32, BITS, BN, BK)
    if BITS == 8:
        found *= scale[:, None]
    place = n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(out + place, found.to(out.dtype.element_ty), mask=n_mask[:, None] & (k < K)[None, :])


@triton.jit
def _normalise(
    x, out, scale, shift, eps, H: tl.constexpr, NORM: tl.constexpr, HAS_SHIFT: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Normalise a row of hidden states."""
    h = tl.arange(0, BLOCK)
    mask = h < H
    scales = tl.load(scale + h, mask=mask, other=0.0).to(tl.float32)
    if HAS_SHIFT:
        shifts = tl.load(shift + h, mask=mask, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0) * H + h
    row = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if NORM == 2:
        row = tl.where(mask, row - tl.sum(row) / H, 0.0)
    row *= tl.rsqrt(tl.sum(row * row) / H + eps) * scales
    if HAS_SHIFT:
        row += shifts
    tl.store(out + place, row.to(out.dtype.element_ty), mask=mask)


def project(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    *,
    activation: int = 0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    norm: Any = None,
    arrived: torch.Tensor | None = None,
    scales: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Up to three projections of x [rows, in] side by side: [rows, sum of outs].

    Args:
        x: the rows.
        weights: each [out, in], with the same strides.
        biases: each [out] or None; all or none of them.
        activation: its number in ACTIVATIONS; 0 for none.
        gated: whether the activation of the first is multiplied by the second.
        residual: added to the result, [rows, out].
        norm: a `skipdecode.fastpath.layer.Norm` that is applied to x first; for a single row only.
        arrived: from `arrivals`; None where no two programs may share outputs.
        scales: of weights in 8 or 4 bits (`skipdecode.kernels.few_bits.FewBitLinear`), of which there is one, or two if
            `gated`.
    """
    rows, inputs = x.shape
    sizes = [len(weight) for weight in weights]
    own = sizes[:1] if gated else sizes
    out = x.new_empty(rows, sum(own))
    spare, bits = 3 - len(weights), _bits(scales)
    tensors = [x, out, out if residual is None else residual, *weights, *[weights[0]] * spare]
    tensors += [weights[0] if bias is None else bias for bias in biases] + [weights[0]] * spare
    tensors += [*scales, *[weights[0]] * (2 - len(scales))]
    strides = weights[0].stride()
    options: dict[str, Any] = {
        "ACTIVATION": activation,
        "GATED": gated,
        "PARTS": len(own),
        "HAS_BIAS": biases[0] is not None,
        "HAS_RESIDUAL": residual is not None,
        "BITS": bits,
        **gpu_device.dependent_launch(x),
    }
    numbers = [*sizes, *[0] * spare]
    if rows == 1:
        padded_inputs = max(32, triton.next_power_of_2(inputs))
        block = max(1, (8192 if bits == 16 else 131072 // bits) // padded_inputs)
        normed = (x, x, 0.0) if norm is None else (norm.weight, x if norm.bias is None else norm.bias, norm.eps)
        options |= {
            "NORM": 0 if norm is None else 1 + norm.centred,
            "HAS_SHIFT": norm is not None and norm.bias is not None,
        }
        warps = 4 if padded_inputs <= (16384 if bits == 16 else 4096) else 8  # else registers don't suffice
        options |= {"BN": block, "BK": padded_inputs, "num_warps": warps}
        grid = (sum(triton.cdiv(size, block) for size in own),)
        _project_row[grid](*tensors, *numbers, *normed, inputs, *strides, **options)
        return out
    padded_rows = max(8, triton.next_power_of_2(rows))
    options["BM"] = padded_rows
    numbers += [rows, sum(own)]
    if rows <= 16 and inputs <= 2048 and bits == 16:
        blocks, processors = sum(triton.cdiv(size, 16) for size in own), gpu_device.processors(x.device)
        splits = 4 if inputs <= 1024 else 8
        fits = splits * 256 * (16 + padded_rows) * 2 <= gpu_device.shared_memory(x.device, "block_optin")
        tiles = None
        if fits and 32 * inputs * blocks <= processors << 17:  # few weights: all of them are loaded at once
            tiles = {"BK": 256, "SPLITS": splits, "STAGES": 1, "num_warps": splits}
        elif blocks >= 3 * processors:
            tiles = {"BK": 128, "SPLITS": 4, "STAGES": 2, "num_warps": 4}
        if tiles is not None:
            _project_small[(blocks,)](*tensors, *numbers, inputs, *strides, BN=16, **tiles, **options)
            return out
    block = 32 if gated else 64
    blocks = sum(triton.cdiv(size, block) for size in own)
    # Triton keeps one more tile for Hopper's own products, which have at least 64 outputs and 16 rows.
    stages, kept = (3, 4) if rows > 8 and not gated and gpu_device.capability(x.device)[0] == 9 else (4, 3)
    shares, partial = 1, out
    if arrived is not None and not gated:
        shares = _shares(blocks, inputs, kept * 128 * (block * bits // 8 + padded_rows * 2), x.device)
    if shares > 1:
        partial = torch.empty(blocks * shares * block * padded_rows, dtype=torch.float32, device=x.device)
    tensors[3:3] = [partial, out if arrived is None else arrived]
    tiles = {"BN": block, "BK": 128, "SHARES": shares, "STAGES": stages, "num_warps": 4}
    _project[(blocks, shares)](*tensors, *numbers, inputs, *strides, **tiles, **options)
    return out


def _shares(blocks: int, inputs: int, held: int, device: torch.device) -> int:
    """How many programs share the same outputs, a power of 2.

    Enough to fill most of the GPU, as the time depends on how many bytes are being loaded at once. Each program has at
    least two tiles, and `held` bytes of shared memory.
    """
    fit = gpu_device.shared_memory(device, "multiprocessor") // held
    shares, at_once = 1, gpu_device.processors(device) * min(PER_PROCESSOR, fit)
    while blocks * shares < 0.7 * at_once and inputs >= 512 * shares:
        shares *= 2
    return shares


def arrivals(device: torch.device) -> torch.Tensor:
    """Counters for `project` of finished programs with the same outputs; concurrent kernels must not share them."""
    return torch.zeros(PER_PROCESSOR * gpu_device.processors(device), dtype=torch.int32, device=device)


def restore(weight: torch.Tensor, scales: torch.Tensor, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """The weights [out, inputs] of a `skipdecode.kernels.few_bits.FewBitLinear` in another type."""
    out = torch.empty(len(weight), inputs, dtype=dtype, device=weight.device)
    grid = (triton.cdiv(len(weight), 16), triton.cdiv(inputs, 256))
    tiles = {"BITS": _bits([scales]), "BN": 16, "BK": 256}
    _write_restored[grid](weight, scales, out, len(weight), inputs, weight.stride(0), **tiles)
    return out


def _bits(scales: Sequence[torch.Tensor]) -> int:
    """The bits of a weight with these scales."""
    return 16 if not scales else 4 if scales[0].dim() == 2 else 8


def normalise(x: torch.Tensor, norm: Any) -> torch.Tensor:
    """Apply a `skipdecode.fastpath.layer.Norm` to x [rows, hidden]."""
    rows, hidden = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(hidden)
    _normalise[(rows,)](
        x, out, norm.weight, x if norm.bias is None else norm.bias, norm.eps, hidden, NORM=1 + norm.centred,
        HAS_SHIFT=norm.bias is not None, BLOCK=block, num_warps=min(16, max(1, block // 256)),
        **gpu_device.dependent_launch(x),
    )  # fmt: skip
    return out
