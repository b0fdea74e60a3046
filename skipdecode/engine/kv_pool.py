"""Keys and values of all sequences of an engine, in one block of memory that is allocated once.

For each layer that its tokens run, a sequence holds as many KV slots as its schedule needs (invariant 6,
docs/how-it-works.md). It gives them back as soon as no later token of it runs the layer (invariant 7).
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch

from skipdecode.errors import ConfigError
from skipdecode.fastpath.model import FastDecoder
from skipdecode.generate.fast_path import free_memory

MEMORY_SHARE = 0.25  # of the free memory, for keys and values, unless `cache_bytes` says otherwise


class Span(NamedTuple):
    """Adjacent KV slots: the index of the first, and how many there are."""

    start: int
    slots: int


class KVPool:
    """KV slots that sequences allocate and free. A slot holds the key and the value of one token in one layer.

    Attributes:
        keys, values: [kv_heads, slots, head_dim].
        slots: number of slots.
        free_slots: number of slots that no sequence holds.

    Examples:
        >>> pool = KVPool(10, 1, 2, torch.float32, torch.device("cpu"))
        >>> spans = pool.allocate([4, 3])
        >>> spans, pool.free_slots, pool.allocate([4])
        ([Span(start=0, slots=4), Span(start=4, slots=3)], 3, None)
        >>> pool.free(spans[0])
        >>> pool.allocate([2, 2, 3]), pool.free_slots
        ([Span(start=0, slots=2), Span(start=2, slots=2), Span(start=7, slots=3)], 0)
    """

    def __init__(self, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.keys, self.values = (torch.empty(kv_heads, slots, head_dim, dtype=dtype, device=device) for _ in "kv")
        self.slots = self.free_slots = slots
        self._gaps = [Span(0, slots)]  # the free slots, ascending; adjacent gaps are merged

    @classmethod
    def for_decoder(
        cls, decoder: FastDecoder, device: torch.device, max_tokens: int, cache_bytes: int | None
    ) -> "KVPool":
        """The pool of an engine.

        Args:
            max_tokens: tokens of all sequences that may be held at once, at full depth.
            cache_bytes: size of the pool; by default enough for `max_tokens`, but at most a quarter of the free memory.

        Raises:
            ConfigError: if `cache_bytes` doesn't hold the shortest sequence.
        """
        block, depth = decoder.layers[0], len(decoder.layers)
        slot_bytes = 2 * block.kv_heads * block.head_dim * torch.empty(0, dtype=decoder.dtype).element_size()
        if cache_bytes is None:
            free = free_memory() if device.type != "cuda" else torch.cuda.mem_get_info(device)[0]
            cache_bytes = int(min(MEMORY_SHARE * free, max_tokens * depth * slot_bytes))
        slots = cache_bytes // slot_bytes
        if slots < 2 * depth:
            raise ConfigError(
                f"cache_bytes is {cache_bytes}: it must be at least {2 * depth * slot_bytes}, for a sequence of two "
                f"tokens in {depth} layers"
            )
        slots = min(slots, 2**31 - 1)  # the kernels index slots by 32-bit integers
        return cls(slots, block.kv_heads, block.head_dim, decoder.dtype, device)

    def allocate(self, counts: Sequence[int]) -> list[Span] | None:
        """Allocate one span of each of these lengths; returns None, and allocates nothing, if one doesn't fit."""
        allocated: list[Span] = []
        for count in counts:
            at = next((n for n, gap in enumerate(self._gaps) if gap.slots >= count), None)
            if at is None:
                for span in allocated:
                    self.free(span)
                return None
            start, slots = self._gaps[at]
            allocated.append(Span(start, count))
            self._gaps[at : at + 1] = [Span(start + count, slots - count)] if slots > count else []
            self.free_slots -= count
        return allocated

    def free(self, span: Span) -> None:
        """Free a span that was allocated."""
        start, end = span.start, span.start + span.slots
        after = bisect_left(self._gaps, span)
        before = after
        if after < len(self._gaps) and self._gaps[after].start == end:
            end += self._gaps[after].slots
            after += 1
        if before and sum(self._gaps[before - 1]) == start:
            before -= 1
            start = self._gaps[before].start
        self._gaps[before:after] = [Span(start, end - start)]
        self.free_slots += span.slots

    def read(self, starts: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """A copy of keys and values of one sequence, of `count` of its KV slots from `first` on.

        Args:
            starts: where the sequence begins in some layers [layers].

        Returns:
            [2, kv_heads, layers, count, head_dim], keys first.
        """
        slots = self._indices(starts, first, count)
        return torch.stack([self.keys[:, slots], self.values[:, slots]])

    def write(self, starts: torch.Tensor, first: int, kept: torch.Tensor) -> None:
        """Write keys and values that `read` has returned, from the slot `first` on."""
        slots = self._indices(starts, first, kept.shape[3])
        self.keys[:, slots], self.values[:, slots] = kept

    def _indices(self, starts: torch.Tensor, first: int, count: int) -> torch.Tensor:
        device = self.keys.device
        return starts.to(device, torch.int64)[:, None] + torch.arange(first, first + count, device=device)

    @property
    def free_regions(self) -> int:
        """Number of contiguous regions that the free slots form."""
        return len(self._gaps)


class PoolLayer:
    """The pool in the form in which the kernels take the cache of a layer: each row of it is one KV slot."""

    is_initialized = True
    generated = 1
    length = 0

    def __init__(self, pool: KVPool) -> None:
        self.buffers = tuple(part.transpose(0, 1).unsqueeze(2) for part in (pool.keys, pool.values))

    def check_room(self, columns: int) -> None:
        """Check nothing: the scheduler has allocated a sequence's slots before any of its tokens runs."""


class PoolCache:
    """The pool in the form in which a decode step takes a cache: the same `PoolLayer` for every layer of the model."""

    def __init__(self, pool: KVPool, num_layers: int) -> None:
        self.layers = [PoolLayer(pool)] * num_layers
