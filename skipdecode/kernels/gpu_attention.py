"""Attention of decode steps and of prompts as Triton kernels, which read the cache where it is.

A cache is the `PlannedCache` of one generation, whose sequences have their rows and share a KV slot in each step, or
the pool of an engine, whose sequences each have a span of KV slots, and slots of their own.

In decode steps cached keys and values of earlier steps are loaded before the kernel before has ended (see
`skipdecode.kernels.gpu`). That is safe, as a step starts with operations of torch, which wait for the whole step
before.
"""

from typing import Any

import torch

from skipdecode.kernels import gpu_device

try:  # transformers refuses code of a checkpoint that imports a missing package outside of a try
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    raise

Rotary = tuple[torch.Tensor, torch.Tensor]

QUERY_BLOCK = 32  # tokens of a prompt whose attention one program computes


@triton.jit
def _turn(head, d, cosines, sines, D: tl.constexpr, ROTATED: tl.constexpr):
    """A head of a query or key with its first dimensions rotated by cosines and signed sines."""
    straight = tl.load(head + d, mask=d < D, other=0.0).to(tl.float32)
    if ROTATED == 0:
        return straight
    half: tl.constexpr = ROTATED // 2
    other = tl.where(d < half, d + half, d - half)
    across = tl.load(head + other, mask=d < ROTATED, other=0.0).to(tl.float32)
    return tl.where(d < ROTATED, straight * cosines + across * sines, straight)


@triton.jit
def _attend(
    query, key, value, keys, values, out, cos, sin, bias, slot_at, starts, count_at, scale, window, query_row,
    query_head, key_row, key_head, value_row, value_head, slot_step, cache_row, cache_head, bias_row, bias_head,
    rotary_row, GROUP: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, ROTATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, IN_SPANS: tl.constexpr, WRITTEN: tl.constexpr, BC: tl.constexpr, WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attention of one query head of one row to the cache, and to its own key and value.

    These are written to the cache, or, if WRITTEN, an earlier kernel has done so.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    kv = head // GROUP
    if WIDE:
        row, kv = row.to(tl.int64), kv.to(tl.int64)
    slot = tl.load(slot_at + row * slot_step).to(tl.int32)
    cached = row * cache_row + kv * cache_head
    runs = True
    if IN_SPANS:
        start = tl.load(starts + row)
        if WIDE:
            start = start.to(tl.int64)
        cached += start * D
        runs = row < tl.load(count_at)
        slot = tl.where(runs, slot, 0)  # what a row computes that doesn't run is never read
    first = tl.maximum(0, slot + 1 - window)
    d = tl.arange(0, D_BLOCK)
    c = tl.arange(0, BC)
    cosines, sines = 0.0, 0.0
    if ROTATED > 0:
        cosines = tl.load(cos + row * rotary_row + d, mask=d < ROTATED, other=0.0).to(tl.float32)
        sines = tl.load(sin + row * rotary_row + d, mask=d < ROTATED, other=0.0).to(tl.float32)
    if WRITTEN:  # perhaps by the kernel before
        end = slot + 1
        if DEPENDENT:
            gdc_launch_dependents()
            gdc_wait()
    else:
        end = slot
    place = cached + (first + c)[:, None] * D + d[None, :]
    mask = (first + c < end)[:, None] & (d < D)[None, :]
    k = tl.load(keys + place, mask=mask, other=0.0)
    v = tl.load(values + place, mask=mask, other=0.0)
    if DEPENDENT and not WRITTEN:
        gdc_launch_dependents()
        gdc_wait()
    turned = _turn(query + row * query_row + head * query_head, d, cosines, sines, D, ROTATED)
    turned = turned.to(query.dtype.element_ty).to(tl.float32) * scale
    seen_by = bias + row * bias_row + head * bias_head
    if WRITTEN:
        best = -float("inf")
        total = 0.0
        acc = tl.zeros((D_BLOCK,), dtype=tl.float32)
    else:
        own = _turn(key + row * key_row + kv * key_head, d, cosines, sines, D, ROTATED).to(keys.dtype.element_ty)
        own_value = tl.load(value + row * value_row + kv * value_head + d, mask=d < D, other=0.0)
        writes = (d < D) & (head % GROUP == 0) & runs
        tl.store(keys + cached + slot * D + d, own, mask=writes)
        tl.store(values + cached + slot * D + d, own_value, mask=writes)
        best = tl.sum(turned * own.to(tl.float32), 0)  # a token always attends to itself
        if HAS_BIAS:
            best += tl.load(seen_by + slot).to(tl.float32)
        total = 1.0
        acc = own_value.to(tl.float32)
    for begin in tl.range(first, end, BC, num_stages=1):
        at = begin + c
        scores = tl.sum(turned[None, :] * k.to(tl.float32), 1)
        if HAS_BIAS:
            scores += tl.load(seen_by + at, mask=at < end, other=0.0).to(tl.float32)
        scores = tl.where(at < end, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 0))
        shares = tl.exp(scores - higher)
        before = tl.exp(best - higher)
        total = total * before + tl.sum(shares, 0)
        acc = acc * before + tl.sum(shares[:, None] * v.to(tl.float32), 0)
        best = higher
        after = at + BC
        place = cached + after[:, None] * D + d[None, :]
        mask = (after < end)[:, None] & (d < D)[None, :]
        k = tl.load(keys + place, mask=mask, other=0.0)
        v = tl.load(values + place, mask=mask, other=0.0)
    tl.store(out + (row * tl.num_programs(1) + head) * D + d, (acc / total).to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _write(
    key, value, keys, values, cos, sin, slots, starts, count_at, key_row, key_head, value_row, value_head, cache_head,
    rotary_row, D: tl.constexpr, D_BLOCK: tl.constexpr, ROTATED: tl.constexpr, WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write one head of one row's key, rotated, and value into its span of the pool."""
    row, head = tl.program_id(0), tl.program_id(1)
    start, slot = tl.load(starts + row), tl.load(slots + row)
    if WIDE:
        row, head, start = row.to(tl.int64), head.to(tl.int64), start.to(tl.int64)
    d = tl.arange(0, D_BLOCK)
    cosines, sines = 0.0, 0.0
    if ROTATED > 0:
        cosines = tl.load(cos + row * rotary_row + d, mask=d < ROTATED, other=0.0).to(tl.float32)
        sines = tl.load(sin + row * rotary_row + d, mask=d < ROTATED, other=0.0).to(tl.float32)
    mask = (d < D) & (row < tl.load(count_at))
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    turned = _turn(key + row * key_row + head * key_head, d, cosines, sines, D, ROTATED)
    plain = tl.load(value + row * value_row + head * value_head + d, mask=d < D, other=0.0)
    place = head * cache_head + (start + slot) * D + d
    tl.store(keys + place, turned.to(keys.dtype.element_ty), mask=mask)
    tl.store(values + place, plain.to(values.dtype.element_ty), mask=mask)


@triton.jit
def _attend_in_prompts(
    query, keys, values, out, bias, slots, starts, firsts, counts, scale, window, query_row, query_head, cache_head,
    bias_head, GROUP: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Attention of one query head of several adjacent tokens of one prompt to its span of the pool."""
    head = tl.program_id(1)
    first, count = tl.load(firsts + tl.program_id(0)), tl.load(counts + tl.program_id(0))
    lowest, start = tl.load(slots + first), tl.load(starts + first)
    kv = head // GROUP
    if WIDE:
        kv, start = kv.to(tl.int64), start.to(tl.int64)
    m = tl.arange(0, BM)
    d = tl.arange(0, D_BLOCK)
    c = tl.arange(0, BC)
    d_mask = d < D
    asks = m < count
    # A row without a query has the first one's, as one that attends to nothing would give NaN.
    token = first + tl.where(asks, m, 0)
    q = tl.load(query + token[:, None] * query_row + head * query_head + d[None, :], mask=d_mask[None, :], other=0.0)
    slot = lowest + tl.where(asks, m, 0)
    cached = kv * cache_head + start * D
    begin = tl.maximum(0, lowest + 1 - window) // BC * BC
    best = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D_BLOCK), tl.float32)
    for here in tl.range(begin, lowest + count, BC):
        at = here + c
        written = at < lowest + count
        place = cached + at[:, None] * D + d[None, :]
        mask = written[:, None] & d_mask[None, :]
        k = tl.load(keys + place, mask=mask, other=0.0)
        v = tl.load(values + place, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        if HAS_BIAS:
            scores += tl.load(bias + head * bias_head + at, mask=written, other=0.0).to(tl.float32)[None, :]
        seen = (at[None, :] <= slot[:, None]) & (at[None, :] > slot[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        # In a sliding window, all keys of the first block may be hidden from a query.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp(scores - finite[:, None])
        before = tl.exp(best - finite)
        total = total * before + tl.sum(shares, 1)
        acc = acc * before[:, None] + tl.dot(shares.to(v.dtype), v)
        best = higher
    place = (token * tl.num_programs(1) + head)[:, None] * D + d[None, :]
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=asks[:, None] & d_mask[None, :])


def attend(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    bias: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    starts: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of one token of each row, whose key and value are written to the cache: [rows, heads * head_dim].

    Args:
        query: [rows, heads, head_dim], the last dimension contiguous.
        key: [rows, kv_heads, head_dim], likewise; None where `write` has written both.
        value: likewise.
        keys: of a cache [rows, kv_heads, slots, head_dim]; of a pool [kv_heads, slots, head_dim], with `starts`. Slots
            before the token's are written.
        values: likewise.
        slots: the KV slot of the tokens [1]; with `starts`, of each in its sequence [rows].
        scale: of the scores.
        bias: added to scores [rows or 1, heads or 1, 1, slots]; not -inf at the token's own slot.
        rotary: cosines and signed sines [rows or 1, 1, rotated dimensions], by which queries and keys are rotated.
        starts: of a pool, where the sequence of each row begins [rows].
        count: of a pool, how many rows run, the first ones [1]; the others write nothing, and their results mean
            nothing.
        window: the size of a sliding window in slots, the token's own included.
    """
    rows, heads, dim = query.shape
    out = query.new_empty(rows, heads * dim)
    own_key, own_value = (query, query) if key is None or value is None else (key, value)
    cos, sin = (query, query) if rotary is None else rotary
    bias_row = bias_head = 0
    if bias is not None:
        bias_row, bias_head = (bias.stride(n) if bias.shape[n] > 1 else 0 for n in (0, 1))
    padded_dim = triton.next_power_of_2(dim)
    # There are many small programs, or few that load more at a time.
    many = rows * heads > 2 * gpu_device.processors(query.device)
    block = min(32, max(16, 4096 // padded_dim)) if many else max(16, 8192 // padded_dim)
    _attend[(rows, heads)](
        query, own_key, own_value, keys, values, out, cos, sin, query if bias is None else bias, slots,
        slots if starts is None else starts, slots if count is None else count, scale,
        keys.shape[-2] if window is None else window, query.stride(0), query.stride(1), own_key.stride(0),
        own_key.stride(1), own_value.stride(0), own_value.stride(1), 0 if starts is None else 1,
        keys.stride(0) if starts is None else 0, keys.stride(-3),
        bias_row, bias_head, cos.stride(0) if len(cos) > 1 else 0, GROUP=heads // keys.shape[-3], D=dim,
        D_BLOCK=padded_dim, ROTATED=0 if rotary is None else cos.shape[-1], HAS_BIAS=bias is not None,
        IN_SPANS=starts is not None, WRITTEN=key is None, BC=block, WIDE=keys.numel() >= 2**31,
        num_warps=1 if many else 4, **gpu_device.dependent_launch(query),
    )  # fmt: skip
    return out


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    count: torch.Tensor,
    rotary: Rotary | None = None,
) -> None:
    """Write keys and values [rows, kv_heads, head_dim] into a pool; the arguments are those of `attend`."""
    rows, heads, dim = key.shape
    cos, sin = (key, key) if rotary is None else rotary
    _write[(rows, heads)](
        key, value, keys, values, cos, sin, slots, starts, count, key.stride(0), key.stride(1), value.stride(0),
        value.stride(1), keys.stride(0), cos.stride(0) if len(cos) > 1 else 0, D=dim,
        D_BLOCK=triton.next_power_of_2(dim), ROTATED=0 if rotary is None else cos.shape[-1],
        WIDE=keys.numel() >= 2**31, num_warps=1, **gpu_device.dependent_launch(key),
    )  # fmt: skip


def attend_in_prompts(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    blocks: tuple[torch.Tensor, torch.Tensor],
    *,
    scale: float,
    bias: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of adjacent tokens of several prompts in a pool: [tokens, heads * head_dim].

    Args:
        query: of all tokens, one prompt's after another's [tokens, heads, head_dim], rotated.
        keys: of the pool [kv_heads, slots, head_dim]; those of the tokens are written.
        values: likewise.
        slots: the KV slot of each token in its sequence [tokens].
        starts: where the sequence of each token begins [tokens].
        blocks: of up to QUERY_BLOCK adjacent tokens of one prompt each: the first token, and their number.
        scale: of the scores.
        bias: added to scores [1, heads or 1, 1, slots].
        window: as in `attend`.
    """
    tokens, heads, dim = query.shape
    out = query.new_empty(tokens, heads * dim)
    firsts, counts = blocks
    _attend_in_prompts[(len(firsts), heads)](
        query, keys, values, out, query if bias is None else bias, slots, starts, firsts, counts, scale,
        keys.shape[1] if window is None else window, query.stride(0), query.stride(1), keys.stride(0),
        0 if bias is None or bias.shape[1] == 1 else bias.stride(1), GROUP=heads // len(keys), D=dim,
        D_BLOCK=max(16, triton.next_power_of_2(dim)), HAS_BIAS=bias is not None, BM=QUERY_BLOCK, BC=32,
        WIDE=keys.numel() >= 2**31, num_warps=4,
    )  # fmt: skip
    return out


def split_heads(qkv: torch.Tensor, heads: int, kv_heads: int, *, interleaved: bool) -> Any:
    """Queries, keys and values as views of their projections [rows, (heads + 2 * kv_heads) * head_dim].

    Each is [rows, its heads, head_dim]. `interleaved`: each head's query, key and value are side by side.
    """
    if interleaved:
        return qkv.view(len(qkv), heads, 3, -1).unbind(2)
    return qkv.view(len(qkv), heads + 2 * kv_heads, -1).split([heads, kv_heads, kv_heads], dim=1)
