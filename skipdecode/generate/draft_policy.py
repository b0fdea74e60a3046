"""Draft policies: how many tokens to draft before full depth verifies them."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from skipdecode.fastpath.sequences import DraftRule
from skipdecode.generate.draft_record import INITIAL_BUDGET, PROBABILITY_BOUNDS, DraftRecord
from skipdecode.generate.pass_seconds import PassSeconds

MAX_DRAFTS = 12  # of a sequence in a round
MAX_ROUNDS = 8  # rounds before their results are used
PACE_STEPS = 4  # steps of full depth that are timed together
_MAX_BUDGET = 24.0  # gains, in steps of full depth, that are set off against later losses
_TRIAL_SHARE = 0.01  # the share of full depth's time that trials of drafts may lose in the long run
# The weight of a round's unexpected time in later predictions, and the largest deviation that counts, in steps of full
# depth: a single round may have been interrupted by other work.
_LEARNING_RATE, _MAX_DEVIATION = 0.1, 3.0
_MAX_REST = 32  # steps of full depth before drafts are considered again
_MIN_SCALE = 0.3  # of the predicted cost of drafts
_PACE_ROUNDS = 40  # rounds with drafts before full depth is timed again: a machine's speed changes
_ENGINE_DRAFTS, _MAX_ENGINE_DRAFTS = 4, 8


class VerifiedRound(NamedTuple):
    """The result of a round: full depth has verified the drafts of some sequences.

    Attributes:
        new_tokens: of all sequences that the round ran together.
        accepted: number of accepted drafts of each sequence; -1 if it had ended before.
        probabilities: of each sequence's drafts, under the schedule that drafted; empty if they aren't known.
        seconds: duration of the round; None if the policy must not depend on time.
    """

    sequences: int
    new_tokens: int
    drafted: Sequence[int]
    accepted: Sequence[int]
    probabilities: Sequence[Sequence[float]] = ()
    seconds: float | None = None


class DraftPolicy(Protocol):
    """Decides round by round how many tokens to draft."""

    @property
    def rests(self) -> bool:
        """Whether the next step should run at full depth, without drafts."""

    @property
    def has_pace(self) -> bool:
        """Whether the policy knows how long a step of full depth takes, or doesn't need to."""

    @property
    def rounds(self) -> int:
        """How many rounds may follow the last `rule` before `rule` is called again."""

    def rule(self, sequences: int, budgets: Sequence[int]) -> DraftRule:
        """What to draft in the next round.

        Args:
            budgets: layers that each draft of a sequence would run; there is room for no more drafts than that.
        """

    def learn(self, verified: VerifiedRound) -> None:
        """Take note of a round's result."""

    def learn_pace(self, sequences: int, steps: int, seconds: float) -> None:
        """Take note of the duration of steps at full depth without drafts."""


class AcceptedPlusOne:
    """Drafts one token more than were accepted in the round before.

    It needs no timings. So it fits the engine, where sequences share passes with others that don't draft.
    """

    rests = False
    has_pace = True
    rounds = 1

    def __init__(self) -> None:
        self._wanted = _ENGINE_DRAFTS

    def rule(self, sequences: int, budgets: Sequence[int]) -> DraftRule:
        return DraftRule([-1.0] * min(self._wanted, len(budgets)), (1.0,), (1.0,))

    def learn(self, verified: VerifiedRound) -> None:
        if any(verified.drafted):
            self._wanted = min(max(verified.accepted) + 1, _MAX_ENGINE_DRAFTS)

    def learn_pace(self, sequences: int, steps: int, seconds: float) -> None:
        """Do nothing: times don't matter."""


class CostDraftPolicy:
    """Drafts as many tokens as are expected to save time. Costs are in steps of full depth for a round's sequences.

    With acceptance rate a, a round of g drafts gives (1 - a^(g + 1)) / (1 - a) tokens per sequence; its cost is that of
    g drafts and of a pass over g + 1 positions. The best g gives a rate of tokens per cost. The next draft is made if
    it, alone or with some that follow it, is likelier to be accepted than its cost at that rate. The drafts that follow
    count because the first verified position may cost more than each further one.

    A budget limits what drafting may lose, by the expected cost of rounds; if rounds are timed, the times correct it.

    Args:
        record: statistics of earlier drafts; it is updated.
        seconds: time of a pass at full depth.
        draft_seconds: time of a pass that drafts; by default as `seconds` says.
    """

    def __init__(
        self, record: DraftRecord, seconds: PassSeconds, num_layers: int, draft_seconds: PassSeconds | None = None
    ) -> None:
        self._record = record
        self._seconds = seconds
        self._draft_seconds = seconds if draft_seconds is None else draft_seconds
        self._num_layers = num_layers
        self._sequences = 1
        self._rest = 0.0  # steps of full depth before `rule` may draft again
        self._costs: list[float] = []  # expected cost of each draft of a sequence

    @property
    def rests(self) -> bool:
        return self._rest > 0

    @property
    def has_pace(self) -> bool:
        return self._record.paced >= PACE_STEPS

    @property
    def rounds(self) -> int:
        cost = self._record.overhead + self._sequences * sum(self._costs)
        return max(1, int(min(MAX_ROUNDS, self._record.budget / max(cost, 1e-9))))

    @property
    def rejection_rate(self) -> float | None:
        """The share of drafts that are rejected; None if too little is known yet."""
        return 1 - self._record.acceptance_rate() if self._record.is_informative else None

    def rule(self, sequences: int, budgets: Sequence[int]) -> DraftRule:
        rate, acceptance_rate = self.rate(sequences, budgets), self._record.acceptance_rate()
        cost = self._record.overhead
        self._costs = []
        for done, budget in enumerate(budgets):
            tokens = sequences * (done + 1)
            verification = self._cost(self._num_layers, tokens + sequences) - self._cost(self._num_layers, tokens)
            each = self._record.scale * (self._draft_cost(budget) + verification) / sequences
            cost += each * sequences
            if cost > self._record.budget:
                break
            self._costs.append(each)
        worth = [rate * _min_cost_per_token(self._costs[n:], acceptance_rate) for n in range(len(self._costs))]
        if worth and (rate <= sequences or worth[0] >= 1):  # drafts don't save time: try one, to see whether that holds
            worth, self._costs = [-1.0], self._costs[:1]
        if not worth:
            self._rest = min(_MAX_REST, (cost - self._record.budget) / _TRIAL_SHARE)
        return DraftRule(worth, PROBABILITY_BOUNDS, self._record.acceptance_rates())

    def rate(self, sequences: int, budgets: Sequence[int], acceptance_rate: float | None = None) -> float:
        """Tokens that the best number of drafts is expected to give in the time of one step of full depth.

        The acceptance rate is by default that of the drafts so far.
        """
        self._sequences = sequences
        record = self._record
        if acceptance_rate is None:
            acceptance_rate = record.acceptance_rate()
        best = tokens = float(sequences)
        step = self._seconds(self._num_layers, sequences)
        drafting, reached = 0.0, 1.0
        for drafts, budget in enumerate(budgets, start=1):
            reached *= acceptance_rate
            tokens += sequences * reached
            drafting += self._draft_seconds(budget, sequences)
            extra = (drafting + self._seconds(self._num_layers, sequences * (drafts + 1))) / step - 1
            best = max(best, tokens / (1 + record.scale * extra + record.overhead))
        return best

    def learn(self, verified: VerifiedRound) -> None:
        record, self._sequences = self._record, verified.sequences
        for probabilities, accepted in zip(verified.probabilities, verified.accepted, strict=False):
            for n, probability in enumerate(probabilities[: accepted + 1]):
                record.add(probability, n < accepted)
        cost = 1 + sum(sum(self._costs[:count]) for count in verified.drafted)
        if any(verified.drafted):
            if verified.seconds is not None and record.pace:
                deviation = verified.seconds / self._pace() - cost - record.overhead
                self._correct(_LEARNING_RATE * min(deviation, _MAX_DEVIATION), (cost - 1) / record.scale)
                record.rounds += 1
                if record.rounds >= _PACE_ROUNDS:
                    record.rounds = record.paced = 0
            cost += record.overhead
        gained = verified.new_tokens / verified.sequences
        self._rest -= gained
        budget = max(-INITIAL_BUDGET, record.budget + gained - cost + _TRIAL_SHARE * gained)
        record.budget = min(_MAX_BUDGET, budget)

    def _correct(self, error: float, drafting: float) -> None:
        """Correct the overhead and the scale by an error in steps of full depth; drafts were predicted to cost
        `drafting`.
        """
        record = self._record
        overhead = max(error, -record.overhead) if record.scale == 1 or error < 0 else 0.0
        record.overhead += overhead
        record.scale = min(1.0, max(_MIN_SCALE, record.scale + (error - overhead) / drafting))

    def learn_pace(self, sequences: int, steps: int, seconds: float) -> None:
        self._sequences = sequences
        self._rest -= steps
        self._record.paced += steps
        self._record.pace.append(seconds / steps / self._seconds(self._num_layers, sequences))
        self._record.budget = min(_MAX_BUDGET, self._record.budget + _TRIAL_SHARE * steps)

    def _pace(self) -> float:
        """Seconds of a step of full depth for the round's sequences."""
        return statistics.median(self._record.pace) * self._seconds(self._num_layers, self._sequences)

    def _draft_cost(self, layers: int) -> float:
        return self._draft_seconds(layers, self._sequences) / self._seconds(self._num_layers, self._sequences)

    def _cost(self, layers: int, tokens: int) -> float:
        return self._seconds(layers, tokens) / self._seconds(self._num_layers, self._sequences)


def _min_cost_per_token(costs: Sequence[float], acceptance_rate: float) -> float:
    """The cost per accepted draft of the next draft, or of the next few drafts if that is lower."""
    cost, accepted, reached, lowest = 0.0, 0.0, 1.0, math.inf
    for each in costs:
        reached *= acceptance_rate
        cost += each
        accepted += reached
        lowest = min(lowest, cost / accepted)
    return lowest
