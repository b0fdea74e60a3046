"""The inputs of a prompt: one row for each token that isn't padding.

Projections, norms and the feed-forward network see these rows only. Attention needs sequences side by side, so
queries, keys and values are laid out in the padded shape for it, with zeros in place of padding.
"""

from collections.abc import Sequence

import torch

from skipdecode.fastpath.kv_cache import PlannedLayer
from skipdecode.fastpath.step_inputs import StepInputs, attention_mask


class PromptInputs(StepInputs):
    """The inputs of the tokens of a prompt, one sequence's after another's.

    Args:
        width: the padded length of the prompt, in tokens.
        shown: the place of each token in the padded prompt, flat [batch * width]; None where there is no padding.
        last: the last token of each sequence [batch], as a row.
        position_ids, rotary: of each token, as in StepInputs.
        bias: as in StepInputs, of the last position over the prompt's slots.
    """

    many_queries = True

    def __init__(
        self,
        batch: int,
        width: int,
        shown: torch.Tensor | None,
        last: torch.Tensor,
        position_ids: torch.Tensor | None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__(width - 1, position_ids, rotary, bias)
        self.batch = batch
        self.width = width
        self.shown = shown
        self.last = last
        self._masks: dict[int | None, torch.Tensor] = {}

    def for_last_tokens(self) -> "LastTokenInputs":
        """The inputs for a layer that returns the output of the last tokens only."""
        return LastTokenInputs(self.batch, self.width, self.shown, self.last, self.position_ids, self.rotary, self.bias)

    def part(self, tokens: slice) -> StepInputs:
        """What the compiled kernels read of some of the tokens."""
        return StepInputs(
            self.slot,
            self.position_ids[tokens] if self.position_ids is not None else None,
            (self.rotary[0][tokens], self.rotary[1][tokens]) if self.rotary is not None else None,
            self.bias,
        )

    def rows_and_slots(self, tokens: int) -> tuple[Sequence[int], Sequence[int]]:
        flat = range(tokens) if self.shown is None else self.shown.tolist()
        return [place // self.width for place in flat], [place % self.width for place in flat]

    def store(
        self, cached: PlannedLayer, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return cached.update(self._pad(key), self._pad(value))

    def lay_out(self, query: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """[tokens, heads, head_dim] -> [batch, heads, width, head_dim]."""
        return self._pad(query)

    def mask(self, query: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor | None:
        """[batch or 1, heads or 1, width, width]; None where attention is causal and nothing else."""
        if window is not None and window >= self.width:
            window = None
        if self.bias is None and window is None:
            return None
        if window not in self._masks:
            slots = torch.arange(self.width, device=query.device)
            self._masks[window] = attention_mask(slots[:, None] - slots, window, self.bias, query.dtype)
        return self._masks[window]

    def take_back(self, attended: torch.Tensor) -> torch.Tensor:
        flat = attended.transpose(1, 2).flatten(2).flatten(0, 1)  # [batch * width, heads * head_dim]
        return flat if self.shown is None else flat[self.shown]

    def _pad(self, heads: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, head_dim] -> [batch, heads, width, head_dim]."""
        if self.shown is not None:
            padded = heads.new_zeros(self.batch * self.width, *heads.shape[1:])
            heads = padded.index_copy_(0, self.shown, heads)
        return heads.view(self.batch, self.width, *heads.shape[1:]).transpose(1, 2)


class LastTokenInputs(PromptInputs):
    """The inputs of a prompt with queries of the last token of each sequence, and keys and values of all tokens."""

    many_queries = False
    lay_out = StepInputs.lay_out
    mask = StepInputs.mask
    take_back = StepInputs.take_back

    def store(
        self, cached: PlannedLayer, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().store(cached, key, value, window)
        start = 0 if window is None else max(0, self.width - window)
        return keys[:, :, start:], values[:, :, start:]
