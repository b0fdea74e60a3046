"""Inputs of a decode step for sequences of different lengths and schedules.

The sets of layers that tokens run are nested (invariant 1, docs/how-it-works.md). With the tokens ordered by the size
of their set, largest first, the tokens that run a given layer are therefore the first ones of the batch (invariant 7).
"""

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from skipdecode.engine.kv_pool import KVPool
from skipdecode.fastpath.model import FastDecoder
from skipdecode.fastpath.step_inputs import StepInputs, attention_mask


def nested_groups(layer_sets: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Group tokens by the sets of layers that they run, so that within each group the sets are nested.

    Schedules with the same placement and the same number of warm-up layers form one group. Returns the indices of each
    group's tokens, those of the largest set first.

    >>> nested_groups([(0, 3), (0, 2, 3), (0, 1), (0, 3), (0,)])
    [[1, 0, 3, 4], [2]]
    """
    groups: list[list[int]] = []
    smallest: list[frozenset[int]] = []  # set of each group
    known: dict[tuple[int, ...], frozenset[int]] = {}
    for token in sorted(range(len(layer_sets)), key=lambda n: -len(layer_sets[n])):
        layers = layer_sets[token]
        layer_set = known.get(layers)
        if layer_set is None:
            layer_set = known[layers] = frozenset(layers)
        for n, last in enumerate(smallest):
            if layer_set is last or layer_set <= last:
                groups[n].append(token)
                smallest[n] = layer_set
                break
        else:
            groups.append([token])
            smallest.append(layer_set)
    return groups


def prefix_lengths(layer_sets: Sequence[tuple[int, ...]]) -> list[int]:
    """For each layer of the first (largest) of several nested sets, the number of sets that contain it.

    >>> prefix_lengths([(0, 1, 3), (0, 3), (0, 3), (0,)])
    [4, 1, 3]
    """
    counts = dict.fromkeys(layer_sets[0], len(layer_sets))
    for n, (above, below) in enumerate(pairwise(layer_sets), start=1):
        if below is not above and len(below) < len(above):
            for layer in set(above) - set(below):
                counts[layer] = n
    return list(counts.values())


class _LayerInputs(StepInputs):
    """The inputs of the tokens that run one layer, which `RaggedInputs` prepares for it."""

    def __init__(
        self,
        pool: KVPool,
        slots: torch.Tensor,
        last: int,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__(last, None, rotary, bias)
        self._pool = pool
        self._slots = slots  # [tokens], each in its own sequence
        every = torch.arange(last + 1, device=slots.device)
        self._distance = slots[:, None] - every  # [tokens, slots], negative behind a sequence's end
        # What is read behind a sequence's end is its own last slot: those of others may hold infinite values, which
        # a mask can't hide.
        self._read = torch.minimum(every, slots[:, None])
        self._masks: dict[int | None, torch.Tensor] = {}

    def move_to(self, starts: torch.Tensor) -> None:
        """Read and write the pool from `starts` [tokens] on: where the layer that runs next has its sequences."""
        self._written = starts + self._slots
        self._attended = starts[:, None] + self._read  # [tokens, slots]

    def store(
        self, cached: Any, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As StepInputs.store; returns keys and values [kv_heads, tokens, slots, head_dim]."""
        keys, values = self._pool.keys, self._pool.values
        keys[:, self._written], values[:, self._written] = key.transpose(0, 1), value.transpose(0, 1)
        return keys[:, self._attended], values[:, self._attended]

    def lay_out(self, query: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """[tokens, heads, head_dim] -> [kv_heads, tokens, heads that share keys, head_dim]."""
        return query.view(len(query), kv_heads, -1, query.shape[-1]).transpose(0, 1)

    def mask(self, query: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
        """[kv_heads or 1, tokens, heads that share keys or 1, slots]."""
        if window not in self._masks:
            bias = self.bias
            if bias is not None:  # [1, heads, 1, slots]
                bias = bias[0, :, 0, : self.slot + 1].view(len(query), 1, -1, self.slot + 1)
            self._masks[window] = attention_mask(self._distance[None, :, None], window, bias, query.dtype)
        return self._masks[window]

    def take_back(self, attended: torch.Tensor) -> torch.Tensor:
        return attended.transpose(0, 1).reshape(attended.shape[1], -1)


class RaggedInputs(StepInputs):
    """The inputs of tokens of several sequences, each at its own slot and with its own layers.

    Tokens that run more layers come first, and the tokens of one sequence ascend. So those that run a layer are the
    first ones.

    Args:
        pool: the memory that holds the sequences' keys and values.
        starts: where each token's sequence begins in the pool, for each layer [tokens, layers of the model], int32 on
            CPU.
        slots: the KV slot of each token in its own sequence.
        sequences: a number for the sequence of each token.
        layers: those that run, ascending.
        counts: for each of them, how many of the tokens run it.
        position_ids, rotary: of each token, as in StepInputs.
        bias: as in StepInputs, of one sequence from its first slot on, beyond the last of `slots`.
    """

    def __init__(
        self,
        pool: KVPool,
        starts: torch.Tensor,
        slots: Sequence[int],
        sequences: Sequence[int],
        layers: Sequence[int],
        counts: Sequence[int],
        position_ids: torch.Tensor | None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__(max(slots), position_ids, rotary, bias)
        self._pool = pool
        self._starts = starts
        self._counts = dict(zip(layers, counts, strict=True))
        self._slots = slots
        self._sequences = sequences
        self._by_count: dict[int, _LayerInputs] = {}

    def rows_and_slots(self, tokens: int) -> tuple[Sequence[int], Sequence[int]]:
        """As StepInputs.rows_and_slots; the rows in the cache are those of `nested_rows`."""
        return self._sequences, self._slots

    def nested_rows(self, layers: Sequence[int]) -> "tuple[array[int], torch.Tensor]":
        """As StepInputs.nested_rows: the pool is a cache whose rows are its slots."""
        return array("i", self._counts.values()), self._starts[:, list(layers)].T.contiguous()

    def rows(self, index: int) -> int | None:
        count = self._counts[index]
        return count if count < len(self._slots) else None

    def of_layer(self, index: int) -> StepInputs:
        count, device = self._counts[index], self._pool.keys.device
        inputs = self._by_count.get(count)
        if inputs is None:
            slots = torch.tensor(self._slots[:count], device=device)
            rotary = (self.rotary[0][:count], self.rotary[1][:count]) if self.rotary is not None else None
            inputs = _LayerInputs(self._pool, slots, max(self._slots[:count]), rotary, self.bias)
            self._by_count[count] = inputs
        inputs.move_to(self._starts[:count, index].to(device, torch.int64))
        return inputs


class PositionTables:
    """Position ids, rotary embeddings and biases by position, in tables that grow with the longest sequence.

    Attributes:
        length: the number of positions.
    """

    def __init__(self, decoder: FastDecoder, device: torch.device) -> None:
        self._decoder = decoder
        self._device = device
        self.length = 0
        self._position_ids: torch.Tensor | None = None
        self._rotary: tuple[torch.Tensor, torch.Tensor] | None = None
        self._bias: torch.Tensor | None = None

    def grow(self, length: int) -> None:
        """Extend the tables to at least `length` positions."""
        if length <= self.length:
            return
        self.length = max(length, 2 * self.length, 256)
        every = torch.arange(self.length, device=self._device)[None]
        position_ids, rotary = self._decoder.placed(every)
        self._position_ids = position_ids[0] if position_ids is not None else None
        self._rotary = (rotary[0][0], rotary[1][0]) if rotary is not None else None
        self._bias = self._decoder.bias(torch.ones_like(every), 0, padded=False)

    def at(
        self, positions: torch.Tensor
    ) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None, torch.Tensor | None]:
        """Position ids, rotary embeddings and bias of tokens at these positions, as `RaggedInputs` takes them."""
        position_ids = self._position_ids.index_select(0, positions) if self._position_ids is not None else None
        rotary = None
        if self._rotary is not None:
            rotary = (self._rotary[0].index_select(0, positions), self._rotary[1].index_select(0, positions))
        return position_ids, rotary, self._bias
