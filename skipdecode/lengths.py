"""Lengths of texts in tokens, as a compact distribution: what the time of a batch follows from."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from skipdecode.errors import ConfigError, check_counts

MOST_BINS = 64  # in a checkpoint's config
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
    def of(cls, values: Iterable[int]) -> "Lengths":
        """The distribution of some texts' lengths, in `MOST_BINS` bins of equal width, each at its mean."""
        exact = Counter(values)
        if not exact:
            raise ConfigError("lengths are empty: expected one at least")
        for length in exact:
            check_counts(tokens=length)
        width = -(-max(exact) // MOST_BINS)
        bins: dict[int, Counter[int]] = {}
        for length, texts in exact.items():
            bins.setdefault((length - 1) // width, Counter())[length] += texts
        pairs = []
        for _, inside in sorted(bins.items()):
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

    def expected_steps(self, rows: int) -> list[tuple[float, float]]:
        """For each decode step of a batch of `rows` such texts: how likely it is run, and how many rows then are left.

        The first token comes from the prompt, so a text of n tokens takes n - 1 steps, and a batch those of its longest
        text: step i is run unless all rows have at most i + 1 tokens.

        >>> Lengths.of([2, 4]).expected_steps(1)
        [(1.0, 1.0), (0.5, 1.0), (0.5, 1.0)]
        >>> Lengths.of([2, 4]).expected_steps(2)
        [(1.0, 2.0), (0.75, 1.3333333333333333), (0.75, 1.3333333333333333)]
        """
        steps = []
        for step in range(self.longest - 1):
            ended = self.share_up_to(step + 1)
            run = 1 - ended**rows
            steps.append((run, rows * (1 - ended) / run))
        return steps
