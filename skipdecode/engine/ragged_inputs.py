"""A decode step of texts at columns of their own and at speeds of their own: each layer runs a prefix of them (law 7).

Layer sets nest (law 1), so with texts ordered deepest budget first, those that run a layer are the first ones, whatever
their positions and schedules.
"""

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from skipdecode.engine.kv_pool import Arena
from skipdecode.fastpath.layer import LeanBlock, StepInputs
from skipdecode.fastpath.model import LeanDecoder


def nested_groups(layer_sets: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Texts that run these sets of layers, in groups in each of which the sets nest, the largest first.

    Schedules of one placement and as many warm-up layers make one group.

    >>> nested_groups([(0, 3), (0, 2, 3), (0, 1), (0, 3), (0,)])
    [[1, 0, 3, 4], [2]]
    """
    groups: list[list[int]] = []
    lasts: list[frozenset[int]] = []  # the smallest set of each
    frozen: dict[tuple[int, ...], frozenset[int]] = {}
    for text in sorted(range(len(layer_sets)), key=lambda n: -len(layer_sets[n])):
        layers = layer_sets[text]
        own = frozen.get(layers)
        if own is None:
            own = frozen[layers] = frozenset(layers)
        for n, last in enumerate(lasts):
            if own is last or own <= last:
                groups[n].append(text)
                lasts[n] = own
                break
        else:
            groups.append([text])
            lasts.append(own)
    return groups


def prefix_lengths(layer_sets: Sequence[tuple[int, ...]]) -> list[int]:
    """For each layer of the first of nested sets, how many of them hold it.

    >>> prefix_lengths([(0, 1, 3), (0, 3), (0, 3), (0,)])
    [4, 1, 3]
    """
    counts = dict.fromkeys(layer_sets[0], len(layer_sets))
    for n, (above, below) in enumerate(pairwise(layer_sets), start=1):
        if below is not above and len(below) < len(above):
            for layer in set(above) - set(below):
                counts[layer] = n
    return list(counts.values())


class _Part(StepInputs):
    """Inputs of the tokens that run a layer: what those of `PrefixInputs` are, without the compiled kernels."""

    def __init__(
        self,
        columns: torch.Tensor,
        last: int,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__(last, None, rotary, bias)
        self._columns = columns  # [tokens]
        every = torch.arange(last + 1, device=columns.device)
        self._distance = columns[:, None] - every  # [tokens, columns], below 0 behind a text's end
        # What is read where a text has no column is its own last one: other texts' could be infinite.
        self._read = torch.minimum(every, columns[:, None])
        self._masks: dict[int | None, torch.Tensor] = {}

    def place(self, arena: Arena, starts: torch.Tensor) -> None:
        """Stand at columns of the arena, from `starts` [tokens] on: those of the layer that runs next."""
        self._arena = arena
        self._own = starts + self._columns
        self._at = starts[:, None] + self._read  # [tokens, columns]

    def attend(
        self, block: LeanBlock, cached: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """As StepInputs.attend."""
        keys, values = self._arena.keys, self._arena.values
        keys[:, self._own], values[:, self._own] = key.transpose(0, 1), value.transpose(0, 1)
        grouped = query.view(len(query), block.kv_heads, -1, block.head_dim).transpose(0, 1)
        attended = block.attention_function(
            grouped,  # [kv_heads, tokens, heads that share keys, head_dim]: texts stand where heads would
            keys[:, self._at],  # [kv_heads, tokens, columns, head_dim]
            values[:, self._at],
            attn_mask=self._mask(block, query.dtype),
            scale=block.scaling,
        )
        return attended.transpose(0, 1).reshape(len(query), -1)

    def _mask(self, block: LeanBlock, dtype: torch.dtype) -> torch.Tensor:
        """What is added to scores [kv_heads or 1, tokens, heads that share keys or 1, columns]."""
        window = block.window
        if window not in self._masks:
            seen = self._distance >= 0
            if window is not None:
                seen &= self._distance < window
            bias: Any = 0.0
            if self.bias is not None:  # [1, heads, 1, columns]
                bias = self.bias[0, :, 0, : self.column + 1].view(block.kv_heads, 1, -1, self.column + 1)
            self._masks[window] = torch.where(seen[None, :, None], bias, float("-inf")).to(dtype)
        return self._masks[window]


class PrefixInputs(StepInputs):
    """Inputs of tokens of several texts, the deepest budget first; those of one text ascend.

    Args:
        arena: that holds the texts' keys and values.
        starts: the first column in the arena of each text in each layer [tokens, layers of the model], int32 on CPU.
        columns: of each token in its own text.
        texts: a number for the text of each token.
        layers: that run, ascending.
        counts: for each of them, how many of the tokens run it.
        position_ids, rotary: as of a step's, of each token.
        bias: as of a step's, of one text from its first column on, beyond the last of `columns`.
    """

    def __init__(
        self,
        arena: Arena,
        starts: torch.Tensor,
        columns: Sequence[int],
        texts: Sequence[int],
        layers: Sequence[int],
        counts: Sequence[int],
        position_ids: torch.Tensor | None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__(max(columns), position_ids, rotary, bias)
        self._arena = arena
        self._starts = starts
        self._counts = dict(zip(layers, counts, strict=True))
        self.columns = columns
        self._texts = texts
        self._parts: dict[int, _Part] = {}

    def places(self, tokens: int) -> tuple[Sequence[int], Sequence[int]]:
        """As StepInputs.places; where the rows lie is said by `prefixes`."""
        return self._texts, self.columns

    def prefixes(self, layers: Sequence[int]) -> "tuple[array[int], torch.Tensor]":
        """As StepInputs.prefixes: a row of the cache is a column of the arena."""
        return array("i", self._counts.values()), self._starts[:, list(layers)].T.contiguous()

    def run(self, block: LeanBlock, index: int, hidden: torch.Tensor, cached: Any) -> torch.Tensor:
        """As StepInputs.run, of the prefix that runs the layer."""
        count = self._counts[index]
        part = self._parts.get(count)
        if part is None:
            part = self._parts[count] = self._first(count, hidden.device)
        starts = self._starts[:count, index].to(hidden.device, torch.int64)
        part.place(self._arena, starts)
        if count == len(hidden):
            return block(hidden, cached, part)
        hidden[:count] = block(hidden[:count], cached, part)
        return hidden

    def _first(self, count: int, device: torch.device) -> _Part:
        columns = torch.tensor(self.columns[:count], device=device)
        rotary = (self.rotary[0][:count], self.rotary[1][:count]) if self.rotary is not None else None
        return _Part(columns, max(self.columns[:count]), rotary, self.bias)


class TextPositions:
    """What the columns of a text are to a model, from its first one on, in tables that grow.

    Args:
        decoder: of the model.
        device: of the model.
    """

    def __init__(self, decoder: LeanDecoder, device: torch.device) -> None:
        self._decoder = decoder
        self._device = device
        self._known = 0
        self._looked_up: torch.Tensor | None = None
        self._rotary: tuple[torch.Tensor, torch.Tensor] | None = None
        self._bias: torch.Tensor | None = None

    def reach(self, columns: int) -> None:
        """Know the first `columns` at least."""
        if columns <= self._known:
            return
        self._known = max(columns, 2 * self._known, 256)
        every = torch.arange(self._known, device=self._device)[None]
        looked_up, rotary = self._decoder.placed(every)
        self._looked_up = looked_up[0] if looked_up is not None else None
        self._rotary = (rotary[0][0], rotary[1][0]) if rotary is not None else None
        self._bias = self._decoder.bias(torch.ones_like(every), 0, padded=False)

    def of(
        self, columns: Sequence[int]
    ) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None, torch.Tensor | None]:
        """Position ids, rotary and bias of tokens at these columns, as `PrefixInputs` takes them."""
        at = torch.tensor(columns, device=self._device)
        looked_up = self._looked_up[at] if self._looked_up is not None else None
        rotary = (self._rotary[0][at], self._rotary[1][at]) if self._rotary is not None else None
        return looked_up, rotary, self._bias
