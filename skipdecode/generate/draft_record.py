"""What earlier rounds have shown of a schedule's drafts: acceptance rates, and times compared with predictions."""

from collections import deque
from collections.abc import Sequence
from typing import Literal, TypeAlias

from skipdecode.fastpath.sequences import bin_of

INITIAL_BUDGET = 1.0  # steps of full depth that drafting may lose before it has gained anything
MAX_PACES = 9  # timings of full depth that are remembered
# The prior acceptance rate of drafts by their probability: up to 0.3, up to 0.5, and so on.
_PRIOR = {0.3: 0.3, 0.5: 0.5, 0.7: 0.7, 0.9: 0.85, 1.0: 0.95}
PROBABILITY_BOUNDS = tuple(_PRIOR)
_PRIOR_RATE = 0.8  # of all drafts
_PRIOR_WEIGHT = 4.0  # drafts that the prior counts for
_MAX_COUNT = 256.0  # drafts that are counted; then older ones lose weight

# How a loop gets its tokens: several per call of the kernels; one by one because a streamer sees each; or from logits
# that processors or the caller read. The times of rounds of one kind say nothing about another.
LoopKind: TypeAlias = Literal["kernels", "streamed", "logits"]


class DraftRecord:
    """Statistics of the drafts of one model and schedule.

    Attributes:
        budget: steps of full depth that drafting may still lose.
        pace: the last measured times of full depth's steps, each divided by the predicted time.
        overhead: time of a round with drafts beyond its passes, in steps of full depth.
        scale: cost of drafts and of the positions that verify them, divided by the predicted cost; at most 1.
        rounds: rounds with drafts since full depth was last timed.
        paced: steps of full depth timed since they were last needed.
    """

    def __init__(self) -> None:
        self._all = [_PRIOR_RATE * _PRIOR_WEIGHT, _PRIOR_WEIGHT]  # accepted drafts, all drafts
        self._by_probability = [[rate * _PRIOR_WEIGHT, _PRIOR_WEIGHT] for rate in _PRIOR.values()]
        self.budget = INITIAL_BUDGET
        self.pace: deque[float] = deque(maxlen=MAX_PACES)
        self.overhead = 0.0
        self.scale = 1.0
        self.rounds = self.paced = 0

    @property
    def is_informative(self) -> bool:
        """Whether observed drafts outweigh the prior."""
        return self._all[1] > 4 * _PRIOR_WEIGHT

    def acceptance_rate(self, probability: float | None = None) -> float:
        """The acceptance rate of all drafts, or of those with such a probability."""
        bounds = PROBABILITY_BOUNDS
        accepted, count = self._all if probability is None else self._by_probability[bin_of(bounds, probability)]
        return accepted / count

    def acceptance_rates(self) -> list[float]:
        """The acceptance rate of drafts for each of `PROBABILITY_BOUNDS`."""
        return [accepted / count for accepted, count in self._by_probability]

    def add(self, probability: float, accepted: bool) -> None:
        """Count one draft that was verified."""
        for counts in (self._by_probability[bin_of(PROBABILITY_BOUNDS, probability)], self._all):
            counts[0] += accepted
            counts[1] += 1
            if counts[1] > _MAX_COUNT:
                counts[:] = [count / 2 for count in counts]


def optimistic_rejection_rates(rates: Sequence[float | None]) -> list[float]:
    """Rejection rates of schedules by increasing depth, with estimates for those that have hardly drafted.

    The estimates are half the rate of the next shallower schedule and at most twice that of the next deeper one: low
    enough that a schedule which may be better is tried. A rate is None if too little is known.
    """
    found = [1 - _PRIOR_RATE if rate is None else rate for rate in rates]
    for n in range(1, len(found)):
        found[n] = min(found[n], found[n - 1] / 2) if rates[n] is None else found[n]
    for n in reversed(range(len(found) - 1)):
        found[n] = min(found[n], 2 * found[n + 1]) if rates[n] is None else found[n]
    return found
