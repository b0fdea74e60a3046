"""Who comes when, of several that are timed in turns, and the speed of one over that of another."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Timed = TypeVar("Timed")


def order_of_turn(timed: Sequence[Timed], turn: int) -> list[Timed]:
    """What is timed, in the order of a turn from 0 on.

    Every second order is the one before, turned round: a machine that grows slower or faster as it goes treats all
    alike, and none comes always behind a larger one, which leaves more in caches. Over twice as many turns as there are
    to time, each comes first twice.
    """
    first = turn // 2 % len(timed)
    order = [*timed[first:], *timed[:first]]
    return order[::-1] if turn % 2 else order


@dataclass(frozen=True)
class Ratio:
    """Times that one is faster than the other: the median over repeats, and the quartiles."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, slower: Sequence[float], faster: Sequence[float]) -> "Ratio":
        """Of the seconds of two decoders that took turns."""
        ratios = [a / b for a, b in zip(slower, faster, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return cls(middle, low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f}x [{self.lower:.2f}, {self.upper:.2f}]"
