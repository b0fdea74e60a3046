"""Logits processors for sequences of different lengths in one batch."""

from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from skipdecode.internals import prefix_allowed_tokens

# Processors that don't read the sequences: they take the logits of all positions at once.
_READ_SCORES_ONLY = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


class ScoreProcessor:
    """Applies logits processors to each position as a loop would that has the whole batch at this length.

    Args:
        token_ids: of prompts and new tokens, [batch, length]; the loop goes on writing into it.
        padding: the token allowed for sequences that `prefix_allowed_tokens_fn` isn't asked about.
        copies: whether the logits must stay as they are even without processors.
    """

    def __init__(self, processors: LogitsProcessorList, token_ids: torch.Tensor, padding: int, *, copies: bool) -> None:
        self._processors = LogitsProcessorList(map(self._for_rows_at_hand, processors))
        self._token_ids = token_ids
        self._padding = padding
        self._copies = copies or bool(processors)  # processors write into what they are given
        self._rows_at_hand: Collection[int] = ()

    def _for_rows_at_hand(self, processor: Any) -> Any:
        """A processor that calls a function for each sequence shall call it only for those that have this length."""
        if not isinstance(processor, PrefixConstrainedLogitsProcessor):
            return processor
        allowed = prefix_allowed_tokens(processor)
        return PrefixConstrainedLogitsProcessor(
            lambda row, ids: allowed(row, ids) if row in self._rows_at_hand else [self._padding], num_beams=1
        )

    def __call__(
        self, rows: Sequence[int], lengths: Sequence[int], counts: Sequence[int], logits: torch.Tensor
    ) -> torch.Tensor:
        """The processed scores of some positions.

        Args:
            rows: sequences, as indices in the batch.
            lengths: for each, the length of the sequence before its first position.
            counts: for each, the number of its positions.
            logits: of all positions, [positions, vocabulary].
        """
        logits = logits.to(copy=self._copies, dtype=torch.float32, device=self._token_ids.device)
        if not self._processors:
            return logits
        if all(type(each) in _READ_SCORES_ONLY for each in self._processors):
            return self._apply(self._token_ids, logits)
        if len(rows) == len(self._token_ids) == len(logits) and len(set(lengths)) == 1:
            self._rows_at_hand = rows
            return self._apply(self._token_ids[:, : lengths[0]], logits)
        places = [
            (row, length + n) for row, length, count in zip(rows, lengths, counts, strict=True) for n in range(count)
        ]
        scores = torch.empty_like(logits)
        for length in {length for _, length in places}:
            at = [n for n, (_, other) in enumerate(places) if other == length]
            rows_here = self._rows_at_hand = [places[n][0] for n in at]
            batch = logits.new_zeros(len(self._token_ids), logits.shape[1])
            batch[rows_here] = logits[at]
            scores[at] = self._apply(self._token_ids[:, :length], batch)[rows_here]
        return scores

    def _apply(self, token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return self._processors(cast(torch.LongTensor, token_ids), cast(torch.FloatTensor, logits))
