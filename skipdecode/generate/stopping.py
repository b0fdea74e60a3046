"""The ends of texts: what stopping criteria say, told without a tensor where they ask for no more than is known."""

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
    """A stopping criterion that ends every row after a number of tokens of its own.

    As transformers' criterion for end tokens it has an `eos_token_id`, by which a decoding loop knows that some rows
    end before others, and pads them.

    Args:
        lengths: new tokens of each row.
        prompt_columns: before them.
        eos_token_id: of the tokenizer.
        device: of the token ids.
    """

    def __init__(self, lengths: Sequence[int], prompt_columns: int, eos_token_id: int, device: torch.device) -> None:
        self.eos_token_id = eos_token_id
        self.columns = [prompt_columns + length for length in lengths]
        self._columns = torch.tensor(self.columns, device=device)  # [batch]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor | None, **kwargs: object) -> torch.Tensor:
        return self._columns <= input_ids.shape[1]


def limited_config(config: GenerationConfig, criteria: StoppingCriteriaList) -> GenerationConfig:
    """A config whose `max_length` is that of the criteria: a `MaxLengthCriteria` of a caller's takes its place."""
    limits = [criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)]
    if not limits or min(limits) == config.max_length:
        return config
    config = copy.copy(config)
    config.max_length = min(limits)
    return config


class Endings:
    """The texts that stopping criteria end.

    Attributes:
        tokens: those that end a text.
        known: whether lengths and end tokens are all that is asked for, so that texts may grow by several tokens before
            they are looked at.
    """

    def __init__(self, criteria: StoppingCriteriaList, batch: int) -> None:
        self._criteria = criteria
        self.tokens: set[int] = set()
        self.known = True
        self._limits: list[float] = [math.inf] * batch
        # Those that only watch (`skipdecode.timing.step_clock`) say how by this method.
        self._others: list[Any] = []  # that ask for more than lengths and end tokens
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
                self._limits = [min(pair) for pair in zip(self._limits, criterion.columns, strict=True)]
            elif isinstance(criterion, MaxLengthCriteria):
                self._limits = [min(limit, criterion.max_length) for limit in self._limits]
                if criterion.max_position_embeddings is not None:
                    self._warns_from = min(self._warns_from, criterion.max_position_embeddings)

    def room(self, row: int, columns: int) -> float:
        """Tokens that a row may grow by, of so many columns."""
        return self._limits[row] - columns

    def show(self, input_ids: torch.Tensor, columns: int) -> None:
        """Show the first `columns` to criteria that only watch, where lengths and end tokens are all that is asked for;
        transformers' own warns of a text that is too long.
        """
        if columns >= self._warns_from:
            self._criteria(input_ids[:, :columns], None)
            return
        for look in self._looks:
            look(columns)

    def by_length(self, input_ids: torch.Tensor) -> bool:
        """Whether the text of `input_ids` [1, columns], which has ended, has done so by its length alone."""
        if self.room(0, input_ids.shape[1]) > 0 or int(input_ids[0, -1]) in self.tokens:
            return False
        return not any(bool(criterion(input_ids, None).any()) for criterion in self._others)

    def __call__(self, input_ids: torch.Tensor, scores: Any, new: int = 1) -> list[bool]:
        """Whether each text of `input_ids` [batch, columns] ends with one of its last `new` columns.

        Several new columns are for what is `known` alone.
        """
        columns = input_ids.shape[1]
        if not self.known:
            found: list[bool] = self._criteria(input_ids, scores).tolist()
            return found
        self.show(input_ids, columns)
        rows = zip(input_ids[:, columns - new :].tolist(), self._limits, strict=True)
        return [columns >= limit or not self.tokens.isdisjoint(row) for row, limit in rows]
