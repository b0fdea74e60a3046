"""Inputs of a decode step for sequences of different lengths and schedules.

The sets of layers that tokens run are nested (invariant 1, docs/explanation.md). With the tokens ordered by the size of
their set, largest first, the tokens that run a given layer are therefore the first ones of the batch (invariant 7).
"""

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from skipdecode.engine.kv_pool import KVPool
from skipdecode.fastpath.layer import LeanBlock, StepInputs
from skipdecode.fastpath.model import LeanDecoder


def nested_groups(layer_sets: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Group tokens by the sets of layers that they run, so that within each group the sets are nested.

    Schedules with the same placement and the same number of warm-up layers form one group.

    Args:
        layer_sets: the layers that each token runs, ascending.

    Returns:
        The indices of each group's tokens, those of the largest set first.

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


class _PrefixPart(StepInputs):
    """Inputs of the first tokens of a step, those that run a layer, for blocks without compiled kernels."""

    def __init__(
        self,
        positions: torch.Tensor,
        last: int,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__(last, None, rotary, bias)
        self._positions = positions  # [tokens]
        every = torch.arange(last + 1, device=positions.device)
        self._distance = positions[:, None] - every  # [tokens, positions], negative beyond a token's own position
        # Beyond its own position a token reads its own slot again: that of another sequence could hold infinities,
        # which a mask doesn't remove.
        self._read = torch.minimum(every, positions[:, None])
        self._masks: dict[int | None, torch.Tensor] = {}

    def locate(self, pool: KVPool, starts: torch.Tensor) -> None:
        """Set the KV slots of the layer that runs next, of which each token's sequence has those from `starts` on."""
        self._pool = pool
        self._own_slots = starts + self._positions  # [tokens]
        self._read_slots = starts[:, None] + self._read  # [tokens, positions]

    def attend(
        self, block: LeanBlock, cached: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See StepInputs.attend."""
        keys, values = self._pool.keys, self._pool.values
        keys[:, self._own_slots], values[:, self._own_slots] = key.transpose(0, 1), value.transpose(0, 1)
        grouped = query.view(len(query), block.kv_heads, -1, block.head_dim).transpose(0, 1)
        attended = block.attention_function(
            grouped,  # [kv_heads, tokens, heads that share keys, head_dim]: tokens take the place of heads
            keys[:, self._read_slots],  # [kv_heads, tokens, positions, head_dim]
            values[:, self._read_slots],
            attn_mask=self._mask(block, query.dtype),
            scale=block.scaling,
        )
        return attended.transpose(0, 1).reshape(len(query), -1)

    def _mask(self, block: LeanBlock, dtype: torch.dtype) -> torch.Tensor:
        """The mask that is added to scores, [kv_heads or 1, tokens, heads that share keys or 1, positions]."""
        window = block.window
        if window not in self._masks:
            seen = self._distance >= 0
            if window is not None:
                seen &= self._distance < window
            bias: Any = 0.0
            if self.bias is not None:  # [1, heads, 1, positions]
                bias = self.bias[0, :, 0, : self.column + 1].view(block.kv_heads, 1, -1, self.column + 1)
            self._masks[window] = torch.where(seen[None, :, None], bias, float("-inf")).to(dtype)
        return self._masks[window]


class PrefixInputs(StepInputs):
    """Inputs of a decode step whose tokens run different numbers of layers: each layer runs on the first tokens.

    Args:
        pool: holds the keys and values of all sequences.
        starts: the first KV slot of each token's sequence in each layer, [tokens, layers of the model], int32 on CPU.
        positions: of each token in its sequence.
        sequences: an integer for each token that identifies its sequence. The positions of one sequence's tokens
            ascend.
        layers: layers that run, ascending.
        counts: for each of `layers`, how many of the tokens run it.
        position_ids: as in StepInputs, [tokens].
        rotary: as in StepInputs, of each token.
        bias: as in StepInputs, for positions from 0 to at least the last of `positions`.
    """

    def __init__(
        self,
        pool: KVPool,
        starts: torch.Tensor,
        positions: Sequence[int],
        sequences: Sequence[int],
        layers: Sequence[int],
        counts: Sequence[int],
        position_ids: torch.Tensor | None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__(max(positions), position_ids, rotary, bias)
        self._pool = pool
        self._starts = starts
        self._counts = dict(zip(layers, counts, strict=True))
        self._positions = positions
        self._sequences = sequences
        self._parts: dict[int, _PrefixPart] = {}

    def places(self, tokens: int) -> tuple[Sequence[int], Sequence[int]]:
        """See StepInputs.places; `prefixes` gives the rows of the cache."""
        return self._sequences, self._positions

    def prefixes(self, layers: Sequence[int]) -> "tuple[array[int], torch.Tensor]":
        """See StepInputs.prefixes; a row of the cache is a KV slot of the pool."""
        return array("i", self._counts.values()), self._starts[:, list(layers)].T.contiguous()

    def run(self, block: LeanBlock, index: int, hidden: torch.Tensor, cached: Any) -> torch.Tensor:
        """See StepInputs.run; the layer runs on the first tokens of `hidden` and leaves the others as they are."""
        count = self._counts[index]
        part = self._parts.get(count)
        if part is None:
            positions = torch.tensor(self._positions[:count], device=hidden.device)
            rotary = (self.rotary[0][:count], self.rotary[1][:count]) if self.rotary is not None else None
            part = self._parts[count] = _PrefixPart(positions, max(self._positions[:count]), rotary, self.bias)
        part.locate(self._pool, self._starts[:count, index].to(hidden.device, torch.int64))
        if count == len(hidden):
            return block(hidden, cached, part)
        hidden[:count] = block(hidden[:count], cached, part)
        return hidden


class PositionTables:
    """Position ids, rotary embeddings and biases by position, in tables that grow with the longest sequence.

    Args:
        decoder: the model's fast path.
        device: of the model.
    """

    def __init__(self, decoder: LeanDecoder, device: torch.device) -> None:
        self._decoder = decoder
        self._device = device
        self._length = 0
        self._position_ids: torch.Tensor | None = None
        self._rotary: tuple[torch.Tensor, torch.Tensor] | None = None
        self._bias: torch.Tensor | None = None

    def grow(self, length: int) -> None:
        """Extend the tables to at least `length` positions."""
        if length <= self._length:
            return
        self._length = max(length, 2 * self._length, 256)
        every = torch.arange(self._length, device=self._device)[None]
        position_ids, rotary = self._decoder.placed(every)
        self._position_ids = position_ids[0] if position_ids is not None else None
        self._rotary = (rotary[0][0], rotary[1][0]) if rotary is not None else None
        self._bias = self._decoder.bias(torch.ones_like(every), 0, padded=False)

    def at(
        self, positions: Sequence[int]
    ) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None, torch.Tensor | None]:
        """Position ids, rotary embeddings and bias of tokens at these positions, as `PrefixInputs` takes them."""
        index = torch.tensor(positions, device=self._device)
        position_ids = self._position_ids[index] if self._position_ids is not None else None
        rotary = (self._rotary[0][index], self._rotary[1][index]) if self._rotary is not None else None
        return position_ids, rotary, self._bias
