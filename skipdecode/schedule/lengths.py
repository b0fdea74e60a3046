"""Compact distributions of sequence lengths, from which the expected decode steps of a batch follow."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from skipdecode.errors import ConfigError, check_counts

# Bounds on what a checkpoint's config stores: bins of a distribution, groups of prompt lengths, bins of each group.
MAX_BINS, MAX_PROMPT_GROUPS, BINS_PER_GROUP = 64, 8, 12
MAX_LENGTH = 1_000_000  # tokens; a larger value is a typing error

# For each decode step of a batch: (the probability that it is run, the mean number of unfinished sequences if it is).
Steps = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Lengths:
    """A distribution of sequence lengths.

    Args:
        counts: (length in tokens, number of sequences) pairs, ascending by length; both at least 1.

    Raises:
        ConfigError: for invalid counts.

    Examples:
        >>> lengths = Lengths.of([3, 5, 5, 8])
        >>> lengths.mean, lengths.longest
        (5.25, 8)
        >>> lengths.share_up_to(5)
        0.75
    """

    counts: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        tokens = [length for length, _ in self.counts]
        if not tokens or sorted(set(tokens)) != tokens:
            raise ConfigError(f"lengths are {str(self.counts)[:60]}: expected (tokens, sequences) pairs, ascending")
        for length, sequences in self.counts:
            check_counts(tokens=length, sequences=sequences)
        if tokens[-1] > MAX_LENGTH:
            raise ConfigError(f"lengths contain {tokens[-1]} tokens: they must be at most {MAX_LENGTH}")

    @classmethod
    def of(cls, values: Iterable[int], bins: int = MAX_BINS) -> "Lengths":
        """The distribution of lengths in tokens, in at most `bins` bins of equal width, each reduced to its mean."""
        exact = Counter(values)
        if not exact:
            raise ConfigError("lengths are empty: expected at least one")
        for length in exact:
            check_counts(tokens=length)
        width = -(-max(exact) // bins)
        binned: dict[int, Counter[int]] = {}
        for length, sequences in exact.items():
            binned.setdefault((length - 1) // width, Counter())[length] += sequences
        pairs = []
        for _, inside in sorted(binned.items()):
            sequences = inside.total()
            pairs.append((round(sum(length * n for length, n in inside.items()) / sequences), sequences))
        return cls(tuple(pairs))

    @classmethod
    def read(cls, values: Any) -> "Lengths":
        """Read a distribution from another one, from the pairs that `to_list` gave, or from lengths in tokens.

        Raises ConfigError for anything else.
        """
        if isinstance(values, cls):
            return values
        try:
            listed = list(values)
            pairs = listed and isinstance(listed[0], Sequence)
            return cls(tuple((length, sequences) for length, sequences in listed)) if pairs else cls.of(listed)
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(f"lengths are {str(values)[:60]!r}: expected lengths in tokens") from error

    def to_list(self) -> list[list[int]]:
        """The counts as lists, for JSON."""
        return [list(pair) for pair in self.counts]

    @property
    def mean(self) -> float:
        """The mean length in tokens."""
        return sum(length * sequences for length, sequences in self.counts) / self._total

    @property
    def longest(self) -> int:
        """The maximum length in tokens."""
        return self.counts[-1][0]

    def share_up_to(self, length: int) -> float:
        """The fraction of sequences that have at most `length` tokens."""
        return self._shares[min(length, self.longest)] if length > 0 else 0.0

    @cached_property
    def _total(self) -> int:
        return sum(sequences for _, sequences in self.counts)

    @cached_property
    def _shares(self) -> list[float]:
        """`share_up_to` of each length from 0 to the longest."""
        shares, so_far, known = [], 0, dict(self.counts)
        for length in range(self.longest + 1):
            so_far += known.get(length, 0)
            shares.append(so_far / self._total)
        return shares

    def expected_steps(self, rows: int) -> Steps:
        """The decode steps of a batch of `rows` sequences drawn from this distribution.

        >>> Lengths.of([2, 4]).expected_steps(1)
        ((1.0, 1.0), (0.5, 1.0), (0.5, 1.0))
        >>> Lengths.of([2, 4]).expected_steps(2)
        ((1.0, 2.0), (0.75, 1.3333333333333333), (0.75, 1.3333333333333333))
        """
        return LengthsByPrompt(((1, self),)).expected_steps([[1] * rows])


@dataclass(frozen=True)
class LengthsByPrompt:
    """Distributions of completion lengths by prompt length, since longer prompts tend to have longer completions.

    Args:
        groups: (maximum prompt length in tokens, distribution of completion lengths) of each group of prompts,
            ascending. A longer prompt than all belongs to the last group.

    Raises:
        ConfigError: for invalid groups.

    Examples:
        >>> lengths = LengthsByPrompt.of([(3, 2), (3, 2), (8, 5), (9, 5)], groups=2)
        >>> lengths.groups[0][0], lengths.groups[1][1].longest
        (3, 5)
        >>> lengths.expected_steps([[3, 3]]), len(lengths.expected_steps([[3, 30]]))
        (((1.0, 2.0),), 4)
    """

    groups: tuple[tuple[int, Lengths], ...]

    def __post_init__(self) -> None:
        tokens = [longest for longest, _ in self.groups]
        if not tokens or sorted(set(tokens)) != tokens:
            raise ConfigError(
                f"prompt groups have lengths of {str(tokens)[:60]} tokens: expected at least one, ascending"
            )
        for longest in tokens:
            check_counts(prompt_tokens=longest)

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]], groups: int = MAX_PROMPT_GROUPS) -> "LengthsByPrompt":
        """Group (prompt length, completion length) pairs into at most `groups` groups of about equal size."""
        by_prompt: dict[int, list[int]] = {}
        for prompt, completion in pairs:
            by_prompt.setdefault(prompt, []).append(completion)
        total, before = sum(map(len, by_prompt.values())), 0
        grouped: dict[int, tuple[int, list[int]]] = {}
        for prompt, completions in sorted(by_prompt.items()):
            # Prompts of one length share the group that holds the middle one of them.
            group = groups * (2 * before + len(completions)) // (2 * total)
            grouped[group] = prompt, grouped.get(group, (0, []))[1] + completions
            before += len(completions)
        return cls(tuple((longest, Lengths.of(found, BINS_PER_GROUP)) for longest, found in grouped.values()))

    @classmethod
    def read(cls, values: Any) -> "LengthsByPrompt":
        """Read the pairs that `to_list` gave. Raises ConfigError for anything else."""
        try:
            return cls(tuple((longest, Lengths.read(lengths)) for longest, lengths in values))
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"lengths by prompt are {str(values)[:60]!r}: expected (prompt tokens, lengths) pairs"
            ) from error

    def to_list(self) -> list[list[Any]]:
        """The groups as lists, for JSON."""
        return [[longest, lengths.to_list()] for longest, lengths in self.groups]

    def expected_steps(self, batches: Sequence[Sequence[int]]) -> Steps:
        """The decode steps of a batch, averaged over `batches`.

        The prefill predicts the first token, so a completion of n tokens takes n - 1 steps, and a batch takes those of
        its longest completion: step i is run unless all sequences have at most i + 1 tokens.

        Args:
            batches: for each batch, the length of each prompt in tokens.
        """
        bounds = [longest for longest, _ in self.groups]
        counts = [Counter(min(bisect_left(bounds, n), len(bounds) - 1) for n in batch) for batch in batches]
        steps = []
        for step in range(max(lengths.longest for _, lengths in self.groups) - 1):
            ended = [lengths.share_up_to(step + 1) for _, lengths in self.groups]
            run = sum(1 - math.prod(ended[group] ** rows for group, rows in count.items()) for count in counts)
            if not run:
                break
            unfinished = sum((1 - ended[group]) * rows for count in counts for group, rows in count.items())
            steps.append((run / len(counts), unfinished / run))
        return tuple(steps)
