"""Several columns a row in one pass, each row from a column of its own on: what verifies drafts.

Projections, norms and the feed-forward half see tokens alone. Attention needs columns, so queries are laid out in them,
and a mask says how far each may look.
"""

from collections.abc import Sequence
from typing import Any

import torch

from skipdecode.fastpath.kv_cache import PlannedLayer
from skipdecode.fastpath.layer import LeanBlock, PreparedInputs, StepInputs


class ColumnsInputs(StepInputs):
    """Inputs of generated tokens that stand below one another, row by row.

    Args:
        prepared: the inputs of all steps.
        starts: the number of each row's first token among its generated ones, 0-based.
        counts: how many tokens of each row there are, one after another; 0 for a row that waits.
        device: of the model.
    """

    def __init__(
        self, prepared: PreparedInputs, starts: Sequence[int], counts: Sequence[int], device: torch.device
    ) -> None:
        batch, most = len(counts), max(counts)
        rows = [row for row, count in enumerate(counts) for _ in range(count)]
        steps = [start + n for start, count in zip(starts, counts, strict=True) for n in range(count)]
        position_ids, rotary = prepared.of_tokens(rows, steps)
        super().__init__(prepared.prompt_columns + max(steps), position_ids, rotary, prepared.bias)
        self._shape = (batch, most)
        self._together = len(set(starts)) == len(set(counts)) == 1
        self._placed = rows, [prepared.prompt_columns + step for step in steps]
        self._rows = torch.tensor(rows, device=device)
        self._columns = torch.tensor(steps, device=device) + prepared.prompt_columns
        # Where tokens stand in [batch * most], and what column each place is of; one that is left over is of the row's
        # last column: it must see something, too.
        places = [row * most + n for row, count in enumerate(counts) for n in range(count)]
        self._places = torch.tensor(places, device=device) if len(places) < batch * most else None
        own = [[start + max(0, min(n, c - 1)) for n in range(most)] for start, c in zip(starts, counts, strict=True)]
        own = own[:1] if self._together else own
        self._own = torch.tensor(own, device=device) + prepared.prompt_columns  # [batch or 1, most]
        self._masks: dict[int | None, torch.Tensor] = {}

    def places(self, tokens: int) -> tuple[Sequence[int], Sequence[int]]:
        """As StepInputs.places."""
        return self._placed

    def attend(
        self, block: LeanBlock, cached: PlannedLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """As StepInputs.attend, of all columns of each row."""
        (batch, most), end = self._shape, self.column + 1
        keys: Any = cached.keys
        values: Any = cached.values
        for held, new in ((keys, key), (values, value)):
            if self._together:
                held[:, :, end - most : end] = new.view(batch, most, *new.shape[1:]).transpose(1, 2)
            else:
                held[self._rows, :, self._columns] = new
        cached.length = end
        if self._places is not None:
            query = query.new_zeros(batch * most, *query.shape[1:]).index_copy_(0, self._places, query)
        groups = block.heads // block.kv_heads  # heads that share keys stand side by side, as in a step
        by_key_head = query.reshape(batch, most, block.kv_heads, groups, -1).transpose(1, 2).flatten(2, 3)
        attended = block.attention_function(
            by_key_head,  # [batch, kv_heads, most * groups, head_dim]
            keys[:, :, :end],
            values[:, :, :end],
            attn_mask=self._mask(groups, block.window, query.dtype),
            scale=block.scaling,
        )
        by_column = attended.view(batch, block.kv_heads, most, groups, -1).transpose(1, 2).reshape(batch * most, -1)
        return by_column if self._places is None else by_column[self._places]

    def _mask(self, groups: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """The values added to scores [batch or 1, heads or 1, most * groups, columns]."""
        if window not in self._masks:
            columns = torch.arange(self.column + 1, device=self._own.device)
            distance = self._own[:, None, :, None] - columns  # [batch or 1, 1, most, columns]
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            bias = 0.0 if self.bias is None else self.bias[..., : self.column + 1]
            mask = torch.where(seen, bias, float("-inf")).to(dtype)
            self._masks[window] = mask.repeat_interleave(groups, dim=2)
        return self._masks[window]
