"""Lengths of texts in tokens, as a compact distribution: what the time of a batch follows from."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from skipdecode.errors import ConfigError, check_counts

MOST_BINS = 64  # in a checkpoint's config
PROMPT_GROUPS, BINS_OF_A_GROUP = 8, 12  # likewise
LONGEST_TEXT = 1_000_000  # tokens; beyond it is a slip of the keyboard


@dataclass(frozen=True)
class Lengths:
    """How many texts have which length.

    Args:
        counts: (tokens, texts), ascending by tokens; both 1 or more.

    Raises:
        ConfigError: for other counts.

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
            raise ConfigError(f"lengths are {str(self.counts)[:60]}: expected (tokens, texts) pairs, ascending")
        for length, texts in self.counts:
            check_counts(tokens=length, texts=texts)
        if tokens[-1] > LONGEST_TEXT:
            raise ConfigError(f"lengths reach {tokens[-1]} tokens: they must be at most {LONGEST_TEXT}")

    @classmethod
    def of(cls, values: Iterable[int], bins: int = MOST_BINS) -> "Lengths":
        """The distribution of some texts' lengths, in at most `bins` bins of equal width, each at its mean."""
        exact = Counter(values)
        if not exact:
            raise ConfigError("lengths are empty: expected one at least")
        for length in exact:
            check_counts(tokens=length)
        width = -(-max(exact) // bins)
        binned: dict[int, Counter[int]] = {}
        for length, texts in exact.items():
            binned.setdefault((length - 1) // width, Counter())[length] += texts
        pairs = []
        for _, inside in sorted(binned.items()):
            texts = inside.total()
            pairs.append((round(sum(length * n for length, n in inside.items()) / texts), texts))
        return cls(tuple(pairs))

    @classmethod
    def read(cls, values: Any) -> "Lengths":
        """The distribution of what `to_list` gave, of texts' lengths, or of one already made.

        Raises ConfigError for something else.
        """
        if isinstance(values, cls):
            return values
        try:
            listed = list(values)
            pairs = listed and isinstance(listed[0], Sequence)
            return cls(tuple((length, texts) for length, texts in listed)) if pairs else cls.of(listed)
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(f"lengths are {str(values)[:60]!r}: expected numbers of tokens") from error

    def to_list(self) -> list[list[int]]:
        """Plain values, for JSON."""
        return [list(pair) for pair in self.counts]

    @property
    def mean(self) -> float:
        """Tokens of a text, on average."""
        return sum(length * texts for length, texts in self.counts) / self._texts

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return self.counts[-1][0]

    def share_up_to(self, length: int) -> float:
        """The share of texts that are no longer than `length` tokens."""
        return self._shares[min(length, self.longest)] if length > 0 else 0.0

    @cached_property
    def _texts(self) -> int:
        return sum(texts for _, texts in self.counts)

    @cached_property
    def _shares(self) -> list[float]:
        """For each length from 0 to the longest, the share of texts that are no longer."""
        shares, so_far, known = [], 0, dict(self.counts)
        for length in range(self.longest + 1):
            so_far += known.get(length, 0)
            shares.append(so_far / self._texts)
        return shares

    def expected_steps(self, rows: int) -> "Steps":
        """The steps of a batch of `rows` such texts.

        >>> Lengths.of([2, 4]).expected_steps(1)
        ((1.0, 1.0), (0.5, 1.0), (0.5, 1.0))
        >>> Lengths.of([2, 4]).expected_steps(2)
        ((1.0, 2.0), (0.75, 1.3333333333333333), (0.75, 1.3333333333333333))
        """
        return LengthsByPrompt(((1, self),)).expected_steps([[1] * rows])


@dataclass(frozen=True)
class LengthsByPrompt:
    """How long texts are behind prompts of which length: longer prompts mostly have longer texts.

    Args:
        groups: (tokens of its longest prompt, lengths of its texts) of each group of prompts, ascending. A prompt that
            is longer than all belongs to the last.

    Raises:
        ConfigError: for other groups.

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
            raise ConfigError(f"groups of prompts are of {str(tokens)[:60]} tokens: expected some, ascending")
        for longest in tokens:
            check_counts(prompt_tokens=longest)

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]], groups: int = PROMPT_GROUPS) -> "LengthsByPrompt":
        """Of (tokens of a prompt, tokens of its text) in at most so many groups, of about as many prompts each."""
        by_prompt: dict[int, list[int]] = {}
        for prompt, text in pairs:
            by_prompt.setdefault(prompt, []).append(text)
        all_texts, before = sum(map(len, by_prompt.values())), 0
        grouped: dict[int, tuple[int, list[int]]] = {}
        for prompt, texts in sorted(by_prompt.items()):  # those of one length stay together, wherever their middle lies
            group = groups * (2 * before + len(texts)) // (2 * all_texts)
            grouped[group] = prompt, grouped.get(group, (0, []))[1] + texts
            before += len(texts)
        return cls(tuple((longest, Lengths.of(texts, BINS_OF_A_GROUP)) for longest, texts in grouped.values()))

    @classmethod
    def read(cls, values: Any) -> "LengthsByPrompt":
        """What `to_list` gave. Raises ConfigError for something else."""
        try:
            return cls(tuple((longest, Lengths.read(lengths)) for longest, lengths in values))
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"lengths by prompt are {str(values)[:60]!r}: expected (tokens, lengths) pairs"
            ) from error

    def to_list(self) -> list[list[Any]]:
        """Plain values, for JSON."""
        return [[longest, lengths.to_list()] for longest, lengths in self.groups]

    def expected_steps(self, batches: Sequence[Sequence[int]]) -> "Steps":
        """The steps of batches, of which the length of each prompt is given: the mean over them.

        The first token comes from the prompt, so a text of n tokens takes n - 1 steps, and a batch those of its longest
        text: step i is run unless all rows have at most i + 1 tokens.
        """
        bounds = [longest for longest, _ in self.groups]
        counts = [Counter(min(bisect_left(bounds, n), len(bounds) - 1) for n in batch) for batch in batches]
        steps = []
        for step in range(max(lengths.longest for _, lengths in self.groups) - 1):
            ended = [lengths.share_up_to(step + 1) for _, lengths in self.groups]
            run = sum(1 - math.prod(ended[group] ** rows for group, rows in count.items()) for count in counts)
            if not run:
                break
            alive = sum((1 - ended[group]) * rows for count in counts for group, rows in count.items())
            steps.append((run / len(counts), alive / run))
        return tuple(steps)


# For each decode step of a batch, how likely it is run, and how many rows are then left.
Steps = tuple[tuple[float, float], ...]
