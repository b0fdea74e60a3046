"""The speed of one decoder over that of another that took turns with it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


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
