"""A key/value cache of the size that a schedule needs, known before the first token is decoded (law 6)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from skipdecode.schedule.schedule import SkipSchedule


class PlannedLayer(CacheLayerMixin):
    """One layer's keys and values [batch, heads, columns, head_dim], in buffers that are allocated once.

    Args:
        generated: how many generated tokens will run the layer. Where there are none, the layer keeps nothing: its
            prompt is attended to once, in the prefill, and never again.
        prompt_columns: room for a prompt; by default the first prompt's own.

    Attributes:
        keys, values: the buffers, of `prompt columns + generated` columns, the first `length` of which are written;
            after `keep_rows`, the first rows of them.
        buffers: both, whole; once there is a prompt.
        columns: that the buffers have room for; 0 until there is a prompt.
    """

    is_sliding = False

    def __init__(self, generated: int, prompt_columns: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generated = generated
        self.prompt_columns = prompt_columns
        self.length = self.columns = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffers for a prompt such as `key_states` [batch, heads, prompt columns, head_dim]."""
        batch, heads, columns, head_dim = key_states.shape
        columns = max(columns, self.prompt_columns) + self.generated
        # Zeros where a whole buffer is attended to, unwritten columns at weight 0: they must not hold NaN.
        new = key_states.new_zeros if self.prompt_columns else key_states.new_empty
        self.hold(new(batch, heads, columns, head_dim), new(batch, heads, columns, value_states.shape[-1]))

    def hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write into memory that somebody else allocated, in place of buffers of its own, of the same shape."""
        self.keys, self.values = self.buffers = keys, values
        self.columns = keys.shape[-2]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append columns; returns all that is held, the new ones included."""
        if self.generated == 0:
            return key_states, value_states
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.keys, self.values
        assert keys is not None  # they are there since lazy_initialization
        assert values is not None
        start, end = self.length, self.length + key_states.shape[-2]
        self.check_room(end)
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.length = end
        if start == 0:
            return key_states, value_states
        return keys[:, :, :end], values[:, :, :end]

    def check_room(self, columns: int) -> None:
        """Raises RuntimeError where so many columns don't fit: compiled kernels would write behind the buffers."""
        if columns > self.columns:
            raise RuntimeError(
                f"the cache was planned for {self.columns} columns, and column {columns} was to be written"
            )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns to attend to when `query_length` more are run, and the index of the first."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Columns written so far."""
        return self.length

    def get_max_length(self) -> int:
        """-1: no column is ever dropped or overwritten, so masks are those of a cache without limit."""
        return -1

    def keep_rows(self, rows: Sequence[int], *, runs: bool) -> None:
        """Hold `rows` alone, in their order, until `reset`; the buffers stay, and what `runs` no more isn't moved."""
        keys, values = self.keys, self.values
        if keys is None or values is None:  # no token runs the layer
            return
        for buffer in (keys, values) if runs else ():
            written = buffer[:, :, : self.length]
            for to, row in enumerate(rows):
                if to != row:  # a slice each: an index tensor would make a copy first, at three times the time
                    written[to] = written[row]
        self.keys, self.values = keys[: len(rows)], values[: len(rows)]

    def reset(self) -> None:
        """Forget what is held; the buffers stay, for a prompt that fits."""
        self.length = 0
        if self.is_initialized:
            self.keys, self.values = self.buffers

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the buffers hold."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self.buffers) if self.is_initialized else 0


class PlannedCache(Cache):
    """A transformers Cache for one generation under a schedule: no concatenation, and no more memory than is needed.

    Args:
        schedule: what will be decoded.
        steps: decode steps at most: new tokens less one, as the last is never an input.
        prompt_columns: room for prompts of several lengths, one after another; by default for the first alone.
    """

    def __init__(self, schedule: SkipSchedule, steps: int, prompt_columns: int = 0) -> None:
        super().__init__(layers=[PlannedLayer(count, prompt_columns) for count in schedule.cutoffs(steps)])

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Hold `rows` alone from now on, in their order, until `reset`. Nothing is allocated or freed.

        A layer whose columns have stayed behind runs no more (law 1), and what it holds is never read again.
        """
        layers: list[Any] = self.layers
        columns = max(layer.length for layer in layers)
        for layer in layers:
            layer.keep_rows(rows, runs=layer.length == columns)

    def roll_back(self, columns: int) -> None:
        """Hold the first `columns` alone; what stood behind them is written over."""
        layers: list[Any] = self.layers
        for layer in layers:
            layer.length = min(layer.length, columns)

    def reset(self) -> None:
        """Forget every column; the buffers stay."""
        for layer in self.layers:
            layer.reset()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that all layers hold; they are allocated by the prefill and don't grow afterwards."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, PlannedLayer))


@contextmanager
def sized_by(cache: Any, layers: Sequence[int]) -> Iterator[None]:
    """While it lasts, a cache answers for a layer that doesn't run with one of the same kind that does.

    transformers makes one mask for each kind of attention and sizes it by the first layer of the kind
    (`transformers.masking_utils`). Where a schedule skips that one, its columns stay behind, and those that run would
    get a mask for fewer columns than they hold. A planned cache has one kind of layers, the first of which always runs.

    Args:
        cache: a Cache of transformers, or None.
        layers: those that run, ascending.
    """
    kinds = [getattr(layer, "is_sliding", False) for layer in cache.layers] if cache is not None else []
    if len(set(kinds)) < 2:
        yield
        return
    running = {kinds[layer]: layer for layer in reversed(layers)}

    def of_running(method: Any) -> Any:
        def answer(*args: Any, layer_idx: int | None = None) -> Any:
            *before, layer = args if layer_idx is None else (*args, layer_idx)
            return method(*before, layer if layer in layers else running.get(kinds[layer], layer))

        return answer

    for name in ("get_mask_sizes", "get_query_offset"):
        setattr(cache, name, of_running(getattr(cache, name)))
    try:
        yield
    finally:
        for name in ("get_mask_sizes", "get_query_offset"):
            delattr(cache, name)
