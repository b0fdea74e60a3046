"""Sequences as several decode steps in one call take them, and the tokens that these give."""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch


def bin_of(bounds: Sequence[float], probability: float) -> int:
    """The number of the bin that a probability is in, of bins with these rising upper bounds."""
    return min(bisect_left(bounds, probability), len(bounds) - 1)


class DraftRule(NamedTuple):
    """When drafting for a sequence stops.

    Attributes:
        min_probabilities: for each draft, the probability that all drafts before it are accepted; the draft is made
            only where it is higher than this.
        bounds: upper bounds of bins of a draft's probability, rising to 1.
        acceptance_rates: of the drafts in each bin.
    """

    min_probabilities: Sequence[float]
    bounds: Sequence[float]
    acceptance_rates: Sequence[float]

    def acceptance_rate(self, probability: float) -> float:
        """The acceptance rate of drafts of such a probability."""
        return self.acceptance_rates[bin_of(self.bounds, probability)]


class RunningSequences(NamedTuple):
    """Sequences that are decoded, each from its latest token.

    Attributes:
        tokens: the latest token of each [sequences], which hasn't run yet.
        rows: the row of each in the cache.
        starts: the number of its token among its generated ones.
        max_tokens: the maximum number of new tokens of each.
        ends: tokens that end a sequence.
    """

    tokens: torch.Tensor
    rows: Sequence[int]
    starts: Sequence[int]
    max_tokens: Sequence[int]
    ends: Collection[int]

    def reach(self, steps: int) -> int:
        """How many generated tokens the longest sequence has run after so many steps."""
        return max(start + min(steps, limit) for start, limit in zip(self.starts, self.max_tokens, strict=True))


class ChosenTokens(NamedTuple):
    """New tokens [sequences, steps], and their number for each sequence; values beyond it mean nothing."""

    tokens: torch.Tensor
    counts: list[int]


class DraftedRounds(NamedTuple):
    """New tokens from rounds of drafting and verification.

    Attributes:
        chosen: the tokens.
        drafted: the number of drafts in each round for each sequence.
        accepted: how many of them full depth chose too; -1 where the sequence had ended before.
        probabilities: of the drafts, [rounds, drafts, sequences].
    """

    chosen: ChosenTokens
    drafted: list[list[int]]
    accepted: list[list[int]]
    probabilities: list[list[list[float]]]
