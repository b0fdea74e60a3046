"""A KV cache of exactly the size that a schedule needs, which is known before the first token is decoded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from skipdecode.schedule.schedule import SkipSchedule


class PlannedLayer(CacheLayerMixin):
    """One layer's keys and values [batch, heads, slots, head_dim], in buffers that are allocated once.

    Args:
        generated: how many generated tokens will run the layer. With 0 the layer stores nothing: its prompt is
            attended to in the prefill only.
        prompt_columns: the padded length of the longest prompt, in tokens; 0 for that of the first prompt.

    Attributes:
        keys: the buffer of keys, with a slot for each token of the prompt and each of `generated`, of which the first
            `length` are written; after `keep_rows`, its first rows.
        values: likewise.
        buffers: keys and values with all rows; allocated by the first prompt.
        slots: the number of slots; 0 before the first prompt.
    """

    is_sliding = False

    def __init__(self, generated: int, prompt_columns: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generated = generated
        self.prompt_columns = prompt_columns
        self.length = self.slots = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffers for a prompt of the shape of `key_states` [batch, heads, length, head_dim]."""
        batch, heads, length, head_dim = key_states.shape
        slots = max(length, self.prompt_columns) + self.generated
        # Where whole buffers are attended to, slots that aren't written have weight 0 and must not hold NaN.
        new = key_states.new_zeros if self.prompt_columns else key_states.new_empty
        self.hold(new(batch, heads, slots, head_dim), new(batch, heads, slots, value_states.shape[-1]))

    def hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Use buffers that were allocated elsewhere, of the shape of its own."""
        self.keys, self.values = self.buffers = keys, values
        self.slots = keys.shape[-2]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of tokens; returns those of all tokens so far."""
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

    def check_room(self, length: int) -> None:
        """Raises RuntimeError where so many tokens don't fit: compiled kernels would write beyond the buffers."""
        if length > self.slots:
            raise RuntimeError(f"the cache has room for {self.slots} tokens, and token {length} was to be written")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of slots to attend to when `query_length` more tokens run, and the index of the first."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """The number of tokens so far."""
        return self.length

    def get_max_length(self) -> int:
        """-1, as of a cache without a limit: no token is ever dropped or overwritten, so masks need none."""
        return -1

    def keep_rows(self, rows: Sequence[int], *, runs: bool) -> None:
        """Keep only `rows`, in their order, until `reset`; the rows of a layer that `runs` no longer aren't moved."""
        keys, values = self.keys, self.values
        if keys is None or values is None:  # no generated token runs the layer
            return
        for buffer in (keys, values) if runs else ():
            written = buffer[:, :, : self.length]
            for to, row in enumerate(rows):
                if to != row:  # indexing with a tensor would copy all rows first and take three times as long
                    written[to] = written[row]
        self.keys, self.values = keys[: len(rows)], values[: len(rows)]

    def reset(self) -> None:
        """Forget all tokens; the buffers stay, for a prompt that fits."""
        self.length = 0
        if self.is_initialized:
            self.keys, self.values = self.buffers

    @property
    def nbytes(self) -> int:
        """The size of the buffers in bytes."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self.buffers) if self.is_initialized else 0


class PlannedCache(Cache):
    """A transformers Cache for one generation under a schedule, allocated once with as much memory as it needs.

    Args:
        schedule: of the generation.
        steps: the maximum number of decode steps: new tokens minus one, as the last token is never an input.
        prompt_columns: the padded length of the longest prompt, in tokens, where several prompts use the cache in
            turn; 0 for that of the first.
    """

    def __init__(self, schedule: SkipSchedule, steps: int, prompt_columns: int = 0) -> None:
        super().__init__(layers=[PlannedLayer(count, prompt_columns) for count in schedule.cutoffs(steps)])

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep only `rows` from now on, in their order, until `reset`. Nothing is allocated or freed.

        A layer that holds fewer tokens than others never runs again, as each step runs a subset of the layers of the
        step before. So its keys and values are never read again.
        """
        layers: list[Any] = self.layers
        length = max(layer.length for layer in layers)
        for layer in layers:
            layer.keep_rows(rows, runs=layer.length == length)

    def roll_back(self, length: int) -> None:
        """Keep only the first `length` tokens; later ones are written over."""
        layers: list[Any] = self.layers
        for layer in layers:
            layer.length = min(layer.length, length)

    @property
    def nbytes(self) -> int:
        """The size of all layers' buffers in bytes; the prefill allocates them, and they don't grow afterwards."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, PlannedLayer))


@contextmanager
def sized_by(cache: Any, layers: Sequence[int]) -> Iterator[None]:
    """A context in which masks have the size that the layers need which run.

    transformers makes one mask for each kind of attention, of the size that the first layer of the kind needs
    (`transformers.masking_utils`). A schedule may skip that layer, whose cache then holds fewer tokens than those of
    the layers that run. In the context the cache answers for a skipped layer with one of the same kind that runs. A
    PlannedCache needs nothing of this: it has one kind of layers, the first of which always runs.
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
