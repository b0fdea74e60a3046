"""What a metric makes of a test set: statistics of each item, whose sums give the score."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class NotAvailableError(Exception):
    """A metric that can't be had here; the message says why, and what would change it."""


@dataclass(frozen=True)
class Statistics:
    """What each item of a test set adds to a score of the whole.

    Attributes:
        items: [items, columns].
        score: the score that the sums of the columns over items, [columns], give.
    """

    items: Array
    score: Callable[[Array], float]

    @property
    def value(self) -> float:
        """The score of all items."""
        return self.score(self.items.sum(axis=0))


def mean_of(scores: Sequence[float], scale: float = 1.0) -> Statistics:
    """A score that is the mean of the items' scores, times `scale`."""
    items = np.array([[scale * score, 1.0] for score in scores])  # [items, 2]
    return Statistics(items, lambda sums: float(sums[0] / sums[1]))
