"""Inputs of chunks of several prompts that run in one pass, each at its own place in the engine's pool."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from skipdecode.engine.kv_pool import KVPool
from skipdecode.engine.ragged_inputs import RaggedInputs
from skipdecode.fastpath.kv_cache import PlannedLayer
from skipdecode.fastpath.prompt_inputs import PromptInputs
from skipdecode.fastpath.step_inputs import StepInputs, attention_mask


class ChunkInputs(PromptInputs):
    """The inputs of the next tokens of several prompts, one prompt's after another's.

    Args:
        pool: the memory that holds the keys and values of the prompts' earlier tokens, and receives those of these.
        starts: where each prompt's sequence begins in the pool, for each layer [prompts, layers of the model], int32 on
            CPU.
        firsts: the KV slot of the first token of each prompt that runs, in its own sequence.
        counts: how many tokens of each prompt run.
        layers: those that run, ascending.
        position_ids, rotary, bias: as in `RaggedInputs`.
    """

    def __init__(
        self,
        pool: KVPool,
        starts: torch.Tensor,
        firsts: Sequence[int],
        counts: Sequence[int],
        layers: Sequence[int],
        position_ids: torch.Tensor | None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        bias: torch.Tensor | None,
    ) -> None:
        last = torch.tensor(list(accumulate(counts)), device=pool.keys.device) - 1
        width = max(first + count for first, count in zip(firsts, counts, strict=True))
        super().__init__(len(counts), width, None, last, position_ids, rotary, bias)
        self.pool = pool
        self.starts = starts
        self.firsts = firsts
        self.counts = counts
        self._layers = layers
        self._rows = [row for row, count in enumerate(counts) for _ in range(count)]
        self._slots = [first + n for first, count in zip(firsts, counts, strict=True) for n in range(count)]
        self._in_layers: LayerChunkInputs | None = None

    def part(self, tokens: slice) -> StepInputs:
        rows = self._rows[tokens]
        return RaggedInputs(
            self.pool,
            self.starts[rows],
            self._slots[tokens],
            rows,
            self._layers,
            [len(rows)] * len(self._layers),
            self.position_ids[tokens] if self.position_ids is not None else None,
            (self.rotary[0][tokens], self.rotary[1][tokens]) if self.rotary is not None else None,
            self.bias,
        )

    def rows_and_slots(self, tokens: int) -> tuple[Sequence[int], Sequence[int]]:
        return self._rows, self._slots

    def of_layer(self, index: int) -> StepInputs:
        if self._in_layers is None:
            self._in_layers = LayerChunkInputs(self)
        return self._in_layers.of_layer(index)

    def for_last_tokens(self) -> "LastChunkInputs":  # type: ignore[override]
        return LastChunkInputs(self)


class LayerChunkInputs(PromptInputs):
    """The inputs for torch's operators. Attention has the prompts side by side, as many queries of each as the longest
    chunk has tokens.
    """

    def __init__(self, chunks: ChunkInputs) -> None:
        batch, longest, device = chunks.batch, max(chunks.counts), chunks.last.device
        shown = None
        if batch > 1:
            places = [row * longest + n for row, count in enumerate(chunks.counts) for n in range(count)]
            shown = torch.tensor(places, device=device)
        super().__init__(batch, longest, shown, chunks.last, chunks.position_ids, chunks.rotary, chunks.bias)
        self._chunks = chunks
        rows, slots = chunks.rows_and_slots(0)
        self._rows, self._slots = (torch.tensor(each, device=device) for each in (rows, slots))  # [tokens]
        firsts, counts = (torch.tensor(each, device=device)[:, None] for each in (chunks.firsts, chunks.counts))
        self._last_slots = firsts + counts - 1  # [batch, 1]
        # Where a chunk is shorter than the longest, a query of its last slot takes the place of padding, as one that
        # attends to nothing would give NaN.
        self._query_slots = torch.minimum(firsts + torch.arange(longest, device=device), self._last_slots)
        self._every = torch.arange(chunks.width, device=device)
        # Behind a prompt's end its own last slot is read: others may hold infinite values, which a mask can't hide.
        self._read = torch.minimum(self._every, self._last_slots)  # [batch, slots]

    def of_layer(self, index: int) -> StepInputs:
        """Read and write the pool where the layer that runs next has its sequences."""
        starts = self._chunks.starts[:, index].to(self._every.device, torch.int64)
        self._written = starts[self._rows] + self._slots
        self._attended = starts[:, None] + self._read
        return self

    def store(
        self, cached: PlannedLayer, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As StepInputs.store; returns keys and values [batch, kv_heads, slots, head_dim]."""
        keys, values = self._chunks.pool.keys, self._chunks.pool.values
        keys[:, self._written], values[:, self._written] = key.transpose(0, 1), value.transpose(0, 1)
        return keys[:, self._attended].transpose(0, 1), values[:, self._attended].transpose(0, 1)

    def mask(self, query: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor | None:
        """[batch, heads or 1, queries, slots]; None where attention is causal and nothing else."""
        width = len(self._every)
        window = None if window is not None and window >= width else window
        if self.bias is None and window is None and width == self.width and not any(self._chunks.firsts):
            return None
        if window not in self._masks:
            distance = self._query_slots[:, None, :, None] - self._every
            bias = self.bias[..., :width] if self.bias is not None else None
            self._masks[window] = attention_mask(distance, window, bias, query.dtype)
        return self._masks[window]


class LastChunkInputs(LayerChunkInputs):
    """The same with queries of the last token of each chunk."""

    many_queries = False
    lay_out = StepInputs.lay_out
    take_back = StepInputs.take_back

    def __init__(self, chunks: ChunkInputs) -> None:
        super().__init__(chunks)
        self._query_slots = self._last_slots
        self.width = 1
