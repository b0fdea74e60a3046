"""The columns of a prompt for lean layers: one row for each token that the mask shows, padding left out.

Projections, norms and the feed-forward half see tokens alone. Attention alone needs columns, so what it reads is laid
out in them, with zeros where a text is padded.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from skipdecode.fastpath.kv_cache import PlannedLayer
from skipdecode.fastpath.layer import LeanBlock, StepInputs

# Rows that a processor computes together: what is between two projections then stays in its caches.
ROWS_TOGETHER = 512


class PromptInputs(StepInputs):
    """Inputs of a prompt's tokens, which stand below one another, text by text.

    Attributes:
        position_ids, rotary: as of a step's, of each token.
        bias: as of a step's, of the last column, over the prompt's columns.
        batch: the number of texts.
        shown: where each token stands in the prompt, [batch * columns] flat; None where no column is hidden.
        last: the last token of each text [batch].
        last_alone: whether there are queries of these alone; keys and values always are of all.
    """

    def __init__(
        self,
        batch: int,
        columns: int,
        shown: torch.Tensor | None,
        last: torch.Tensor,
        position_ids: torch.Tensor | None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__(columns - 1, position_ids, rotary, bias)
        self.batch = batch
        self.shown = shown
        self.last = last
        self.last_alone = False
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def places(self, tokens: int) -> tuple[Sequence[int], Sequence[int]]:
        """As StepInputs.places."""
        width = self.column + 1
        flat = range(tokens) if self.shown is None else self.shown.tolist()  # in the order of the tokens
        return [place // width for place in flat], [place % width for place in flat]

    def part(self, tokens: slice) -> StepInputs:
        """Of some of the tokens."""
        return StepInputs(
            self.column,
            self.position_ids[tokens] if self.position_ids is not None else None,
            (self.rotary[0][tokens], self.rotary[1][tokens]) if self.rotary is not None else None,
            self.bias,
        )

    def update_cache(
        self, layer: PlannedLayer, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Write all tokens' keys and values; returns what the last column attends to, and its bias."""
        keys, values = layer.update(self._in_columns(key), self._in_columns(value))
        start = 0 if window is None else max(0, self.column + 1 - window)
        return keys[:, :, start:], values[:, :, start:], self.bias[..., start:] if self.bias is not None else None

    def attend(
        self, block: LeanBlock, cached: PlannedLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """As StepInputs.attend; with queries of the last tokens alone where they are alone."""
        if self.last_alone:
            return super().attend(block, cached, query, key, value)
        keys, values, _ = self.update_cache(cached, key, value, None)
        mask = self._mask(block.window)
        attended = F.scaled_dot_product_attention(
            self._in_columns(query),
            _for_each_query(keys, block.heads),
            _for_each_query(values, block.heads),
            attn_mask=mask,
            is_causal=mask is None,
            scale=block.scaling,
        )  # [batch, heads, columns, head_dim]
        flat = attended.transpose(1, 2).flatten(2).flatten(0, 1)  # [batch * columns, heads * head_dim]
        return flat if self.shown is None else flat[self.shown]

    def by_rows(self, function: Callable[..., torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
        """As StepInputs.by_rows, some hundred rows at a time on CPU."""
        parts = -(-len(rows[0]) // ROWS_TOGETHER)
        if rows[0].device.type != "cpu" or parts <= 1:
            return function(*rows)
        return torch.cat([function(*part) for part in zip(*(each.chunk(parts) for each in rows), strict=True)])

    def _in_columns(self, heads: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, head_dim] -> [batch, heads, columns, head_dim]."""
        columns = self.column + 1
        if self.shown is not None:
            padded = heads.new_zeros(self.batch * columns, *heads.shape[1:])
            heads = padded.index_copy_(0, self.shown, heads)
        return heads.view(self.batch, columns, *heads.shape[1:]).transpose(1, 2)

    def _mask(self, window: int | None) -> torch.Tensor | None:
        """What each column attends to, [batch or 1, heads or 1, columns, columns]; None for all up to itself."""
        if window is not None and window > self.column:
            window = None
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> torch.Tensor | None:
        if self.bias is None and window is None:
            return None
        columns = torch.arange(self.column + 1, device=self.last.device)
        distance = columns[:, None] - columns
        seen = distance >= 0
        if window is not None:
            seen &= distance < window
        return seen if self.bias is None else torch.where(seen, self.bias, float("-inf"))


def _for_each_query(heads: torch.Tensor, count: int) -> torch.Tensor:
    """Keys or values [batch, heads, columns, head_dim] with those that several queries share repeated."""
    return heads if heads.shape[1] == count else heads.repeat_interleave(count // heads.shape[1], dim=1)
