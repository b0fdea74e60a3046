"""Keys and values of many texts in one piece of memory, allocated once.

Of each layer that its tokens run, a text holds as many columns as its schedule needs (law 6), and gives them back when
it has passed the layer's cutoff (law 7).
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from skipdecode.fastpath.kv_cache import PlannedCache
from skipdecode.schedule.schedule import SkipSchedule


class Span(NamedTuple):
    """Columns that stand side by side: the first, and how many there are."""

    start: int
    columns: int


class Arena:
    """Columns of keys and values that texts take and give back, of any layer.

    Args:
        columns: how many there are.
        kv_heads, head_dim: of every layer.
        dtype, device: of the model.

    Attributes:
        keys, values: [kv_heads, columns, head_dim].
        free: columns that nobody holds.

    Examples:
        >>> arena = Arena(10, 1, 2, torch.float32, torch.device("cpu"))
        >>> held = arena.take([4, 3])
        >>> held, arena.free, arena.take([4])
        ([Span(start=0, columns=4), Span(start=4, columns=3)], 3, None)
        >>> arena.give(held[0])
        >>> arena.take([2, 2, 3]), arena.free
        ([Span(start=0, columns=2), Span(start=2, columns=2), Span(start=7, columns=3)], 0)
    """

    def __init__(self, columns: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.keys, self.values = (torch.empty(kv_heads, columns, head_dim, dtype=dtype, device=device) for _ in "kv")
        self.columns = self.free = columns
        self._gaps = [Span(0, columns)]  # ascending, none beside another

    def take(self, counts: Sequence[int]) -> list[Span] | None:
        """A span of each of so many columns; None, and nothing is taken, where one doesn't fit now."""
        taken: list[Span] = []
        for count in counts:
            at = next((n for n, gap in enumerate(self._gaps) if gap.columns >= count), None)
            if at is None:
                for span in taken:
                    self.give(span)
                return None
            start, columns = self._gaps[at]
            taken.append(Span(start, count))
            self._gaps[at : at + 1] = [Span(start + count, columns - count)] if columns > count else []
            self.free -= count
        return taken

    def give(self, span: Span) -> None:
        """Give columns back."""
        start, end = span.start, span.start + span.columns
        after = bisect_left(self._gaps, span)
        before = after
        if after < len(self._gaps) and self._gaps[after].start == end:
            end += self._gaps[after].columns
            after += 1
        if before and sum(self._gaps[before - 1]) == start:
            before -= 1
            start = self._gaps[before].start
        self._gaps[before:after] = [Span(start, end - start)]
        self.free += span.columns

    def cache_of(self, schedule: SkipSchedule, steps: int, spans: Sequence[Span | None]) -> PlannedCache:
        """The planned cache of one text, for its prompt: its layers hold their spans, or nothing.

        Args:
            schedule, steps: as of the cache.
            spans: of each layer; None for one that no generated token runs.
        """
        cache = PlannedCache(schedule, steps)
        held: list[Any] = cache.layers
        for layer, span in zip(held, spans, strict=True):
            if span is not None:
                part = slice(span.start, span.start + span.columns)
                layer.hold(self.keys[None, :, part], self.values[None, :, part])
        return cache

    @property
    def gaps(self) -> int:
        """Pieces that the free columns are in."""
        return len(self._gaps)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that keys and values take."""
        return 2 * self.keys.numel() * self.keys.element_size()


class ArenaLayer:
    """The arena as the kernels take a layer's keys and values: rows are columns, from which a text's columns go on.

    Attributes:
        buffers: keys and values, [columns, kv_heads, 1, head_dim] both.
    """

    is_initialized = True
    generated = 1
    length = 0

    def __init__(self, arena: Arena) -> None:
        self.buffers = tuple(part.transpose(0, 1).unsqueeze(2) for part in (arena.keys, arena.values))

    def check_room(self, columns: int) -> None:
        """Nothing to check: a text gets its columns before it runs."""


class ArenaCache:
    """The arena in place of a cache: every layer's keys and values are somewhere in it.

    Attributes:
        arena: the memory.
        layers: the same for each layer of the model.
    """

    def __init__(self, arena: Arena, num_layers: int) -> None:
        self.arena = arena
        self.layers = [ArenaLayer(arena)] * num_layers
