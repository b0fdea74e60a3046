"""Interleaved timing: the order in which several systems take turns, and the ratio of their times."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Timed = TypeVar("Timed")


def order_of_turn(timed: Sequence[Timed], turn: int) -> list[Timed]:
    """The order in which systems are timed in a turn, counted from 0.

    Every second order reverses the one before: a machine that becomes slower or faster then treats all systems alike,
    and no system always follows one that leaves more in the processor's caches. Over two turns per system, each comes
    first twice.
    """
    first = turn // 2 % len(timed)
    order = [*timed[first:], *timed[:first]]
    return order[::-1] if turn % 2 else order


@dataclass(frozen=True)
class Ratio:
    """How many times faster one system is than another: the median over repeats, and the quartiles."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, slower: Sequence[float], faster: Sequence[float]) -> "Ratio":
        """The ratio of the seconds of two systems that took turns."""
        ratios = [a / b for a, b in zip(slower, faster, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return cls(middle, low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f}x [{self.lower:.2f}, {self.upper:.2f}]"
