"""The inputs of several tokens of each sequence in one pass, each sequence at its own slots: how drafts are verified.

Projections, norms and the feed-forward network see a row for each token. For attention queries are laid out as
[batch, tokens of the longest], and a mask says what each may attend to.
"""

from collections.abc import Sequence
from typing import Any

import torch

from skipdecode.fastpath.kv_cache import PlannedLayer
from skipdecode.fastpath.step_inputs import PreparedInputs, StepInputs, attention_mask


class VerifyInputs(StepInputs):
    """The inputs of generated tokens, one sequence's after another's.

    Args:
        starts: the number of each sequence's first token among its generated ones, 0-based.
        counts: how many tokens of each sequence run; 0 for one that waits.
    """

    def __init__(
        self, prepared: PreparedInputs, starts: Sequence[int], counts: Sequence[int], device: torch.device
    ) -> None:
        batch, longest = len(counts), max(counts)
        rows = [row for row, count in enumerate(counts) for _ in range(count)]
        steps = [start + n for start, count in zip(starts, counts, strict=True) for n in range(count)]
        position_ids, rotary = prepared.of_tokens(rows, steps)
        super().__init__(prepared.prompt_columns + max(steps), position_ids, rotary, prepared.bias)
        self._shape = (batch, longest)
        self._together = len(set(starts)) == len(set(counts)) == 1
        self._rows_and_slots = rows, [prepared.prompt_columns + step for step in steps]
        self._rows = torch.tensor(rows, device=device)
        self._slots = torch.tensor(steps, device=device) + prepared.prompt_columns
        # The place of each token in [batch * longest], and the slot of each place. A place without a token has the
        # slot of the sequence's last one: a query that attends to nothing would give NaN.
        places = [row * longest + n for row, count in enumerate(counts) for n in range(count)]
        self._places = torch.tensor(places, device=device) if len(places) < batch * longest else None
        own = [[start + max(0, min(n, c - 1)) for n in range(longest)] for start, c in zip(starts, counts, strict=True)]
        own = own[:1] if self._together else own
        self._query_slots = torch.tensor(own, device=device) + prepared.prompt_columns  # [batch or 1, longest]
        self._masks: dict[int | None, torch.Tensor] = {}

    def rows_and_slots(self, tokens: int) -> tuple[Sequence[int], Sequence[int]]:
        return self._rows_and_slots

    def store(
        self, cached: PlannedLayer, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (batch, longest), end = self._shape, self.slot + 1
        keys: Any = cached.keys
        values: Any = cached.values
        for held, new in ((keys, key), (values, value)):
            if self._together:
                held[:, :, end - longest : end] = new.view(batch, longest, *new.shape[1:]).transpose(1, 2)
            else:
                held[self._rows, :, self._slots] = new
        cached.length = end
        return keys[:, :, :end], values[:, :, :end]

    def lay_out(self, query: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """[tokens, heads, head_dim] -> [batch, kv_heads, longest * heads that share keys, head_dim]."""
        batch, longest = self._shape
        if self._places is not None:
            query = query.new_zeros(batch * longest, *query.shape[1:]).index_copy_(0, self._places, query)
        by_position = query.reshape(batch, longest, kv_heads, -1, query.shape[-1])
        return by_position.transpose(1, 2).flatten(2, 3)

    def mask(self, query: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
        """[batch or 1, heads or 1, longest * heads that share keys, slots]."""
        if window not in self._masks:
            slots = torch.arange(self.slot + 1, device=query.device)
            distance = self._query_slots[:, None, :, None] - slots  # [batch or 1, 1, longest, slots]
            bias = None if self.bias is None else self.bias[..., : self.slot + 1]
            mask = attention_mask(distance, window, bias, query.dtype)
            self._masks[window] = mask.repeat_interleave(query.shape[2] // self._shape[1], dim=2)
        return self._masks[window]

    def take_back(self, attended: torch.Tensor) -> torch.Tensor:
        batch, longest = self._shape
        kv_heads, head_dim = attended.shape[1], attended.shape[-1]
        by_position = attended.view(batch, kv_heads, longest, -1, head_dim).transpose(1, 2)
        flat = by_position.reshape(batch * longest, -1)
        return flat if self._places is None else flat[self._places]
