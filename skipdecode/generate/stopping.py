"""The ends of sequences by stopping criteria, found without calling these if only lengths and end tokens matter."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)


class RowLengths(StoppingCriteria):
    """A stopping criterion that ends each sequence after its own number of new tokens.

    Like transformers' criterion for end tokens it has an `eos_token_id`: it tells a decoding loop that some sequences
    end before others and are padded. The prompt length includes padding.
    """

    def __init__(self, lengths: Sequence[int], prompt_length: int, eos_token_id: int, device: torch.device) -> None:
        self.eos_token_id = eos_token_id
        self.max_lengths = [prompt_length + length for length in lengths]
        self._max_lengths = torch.tensor(self.max_lengths, device=device)  # [batch]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor | None, **kwargs: object) -> torch.Tensor:
        return self._max_lengths <= input_ids.shape[1]


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a sequence: the tokenizer's end token, and those of the model's generation settings."""
    configured = model.generation_config.eos_token_id
    of_model = configured if isinstance(configured, list) else [] if configured is None else [configured]
    return list(dict.fromkeys([tokenizer.eos_token_id, *of_model]))


def limited_config(config: GenerationConfig, criteria: StoppingCriteriaList) -> GenerationConfig:
    """The config with the `max_length` of a caller's own `MaxLengthCriteria`, if there is one."""
    limits = [criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)]
    if not limits or min(limits) == config.max_length:
        return config
    config = copy.copy(config)
    config.max_length = min(limits)
    return config


class Endings:
    """Finds out which sequences the stopping criteria end.

    Attributes:
        tokens: tokens that end a sequence.
        known: whether only lengths and end tokens matter, so that sequences may grow by several tokens between calls.
    """

    def __init__(self, criteria: StoppingCriteriaList, batch: int) -> None:
        self._criteria = criteria
        self.tokens: set[int] = set()
        self.known = True
        self._max_lengths: list[float] = [math.inf] * batch
        self._others: list[Any] = []  # criteria for which more than lengths and end tokens matters
        # Criteria that only observe (`skipdecode.timing.step_clock`) have a method `look`.
        self._looks = [criterion.look for criterion in criteria if hasattr(criterion, "look")]
        self._warns_from = math.inf
        for criterion in criteria:
            understood = type(criterion) in (EosTokenCriteria, MaxLengthCriteria, RowLengths)
            if not understood and not hasattr(criterion, "look"):
                self.known = False
                self._others.append(criterion)
            if isinstance(criterion, EosTokenCriteria):
                self.tokens |= set(criterion.eos_token_id.tolist())
            elif isinstance(criterion, RowLengths):
                self._max_lengths = [min(pair) for pair in zip(self._max_lengths, criterion.max_lengths, strict=True)]
            elif isinstance(criterion, MaxLengthCriteria):
                self._max_lengths = [min(length, criterion.max_length) for length in self._max_lengths]
                if criterion.max_position_embeddings is not None:
                    self._warns_from = min(self._warns_from, criterion.max_position_embeddings)

    def room(self, row: int, length: int) -> float:
        """Tokens that a sequence may still grow by from this length."""
        return self._max_lengths[row] - length

    def show(self, input_ids: torch.Tensor, length: int) -> None:
        """Show the first `length` positions to criteria that observe or warn, if only lengths and end tokens matter.

        Transformers' length criterion warns of sequences that are longer than the model has positions.
        """
        if length >= self._warns_from:
            self._criteria(input_ids[:, :length], None)
            return
        for look in self._looks:
            look(length)

    def by_length(self, input_ids: torch.Tensor) -> bool:
        """Whether only its length ended the sequence `input_ids` [1, length]."""
        if self.room(0, input_ids.shape[1]) > 0 or int(input_ids[0, -1]) in self.tokens:
            return False
        return not any(bool(criterion(input_ids, None).any()) for criterion in self._others)

    def __call__(self, input_ids: torch.Tensor, scores: Any, new: int = 1) -> list[bool]:
        """Whether each sequence [batch, length] ends within its last `new` positions, which criteria haven't seen; more
        than one only if the ends are `known`.
        """
        length = input_ids.shape[1]
        if not self.known:
            ended: list[bool] = self._criteria(input_ids, scores).tolist()
            return ended
        self.show(input_ids, length)
        rows = zip(input_ids[:, length - new :].tolist(), self._max_lengths, strict=True)
        return [length >= limit or not self.tokens.isdisjoint(row) for row, limit in rows]
