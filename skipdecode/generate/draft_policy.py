"""How many tokens to draft before full depth verifies: by what passes cost, and how often drafts were taken so far."""

import functools
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from skipdecode.fastpath.cpu_steps import DraftRule, bin_of
from skipdecode.schedule.cost import CostModel
from skipdecode.schedule.machine_profile import Profile

MOST_DRAFTS = 12  # of a row in a round
MOST_ROUNDS = 8  # before what they showed is looked at
# What drafting may lose before it has won anything, how much of it is held against bad times, both in steps of full
# depth; and the share of full depth's time that may be lost for ever: what drafts are tried with where they don't pay.
START, MOST_HELD, MAY_LOSE = 1.0, 24.0, 0.01
# How much of what a round took otherwise than expected counts towards what rounds are expected to take: a single one
# that the machine interrupted says little, and may say no more than that it took so many steps more.
_NEW, _STRAY = 0.1, 3.0
_MOST_RESTED = 32  # steps of full depth before it is asked again whether drafts pay
_CHEAPEST = 0.3  # of what drafts are expected to cost
PACE_STEPS = 4  # of full depth, whose time is taken
_PACES = 9  # times of full depth's steps that are remembered
_PACE_LASTS = 40  # rounds with drafts: what a machine does is not for ever what it did
# Drafts of like confidence are taken alike: up to each of these probabilities, how often at first guess.
_GUESSES = {0.3: 0.3, 0.5: 0.5, 0.7: 0.7, 0.9: 0.85, 1.0: 0.95}
_BOUNDS = tuple(_GUESSES)
_GUESSED = 4.0  # drafts that a guess counts for
_REMEMBERED = 256.0  # drafts, beyond which the older ones fade

# How tokens are chosen: several in a call of the kernels, one by one where a streamer sees each, or of logits that
# somebody looks at. What rounds of one kind take says nothing of another.
LoopKind = Literal["ahead", "streamed", "looked at"]
# layers and tokens of a pass -> seconds
PassSeconds = Callable[[int, int], float]


class DraftRecord:
    """The drafts of one model and schedule so far: how many were taken, what rounds took, and what they may still lose.

    Attributes:
        may_lose: by drafting, in steps of full depth.
        pace: seconds of full depth's steps over what was expected of them, lately.
        beyond: what rounds with drafts take beyond their passes, in steps of full depth.
        scale: what drafts and the columns that verify them cost, over what is expected of them; 1 at most.
        rounds: with drafts, since full depth's pace was taken.
        paced: steps of full depth whose time was taken since there were so many rounds that it no longer counted.
    """

    def __init__(self) -> None:
        self._of_all = [0.8 * _GUESSED, _GUESSED]  # taken, of how many
        self._by_confidence = [[guess * _GUESSED, _GUESSED] for guess in _GUESSES.values()]
        self.may_lose = START
        self.pace: deque[float] = deque(maxlen=_PACES)
        self.beyond = 0.0
        self.scale = 1.0
        self.rounds = self.paced = 0

    @property
    def tells(self) -> bool:
        """Whether drafts were seen, more than were guessed."""
        return self._of_all[1] > 4 * _GUESSED

    def taken(self, confidence: float | None = None) -> float:
        """The share of drafts that are taken: of all, or of those that had such a probability."""
        taken, count = self._of_all if confidence is None else self._by_confidence[bin_of(_BOUNDS, confidence)]
        return taken / count

    def shares(self) -> list[float]:
        """The share of drafts that are taken, for each of the bounds of their probabilities."""
        return [taken / count for taken, count in self._by_confidence]

    def add(self, confidence: float, taken: bool) -> None:
        """Count one draft."""
        for counts in (self._by_confidence[bin_of(_BOUNDS, confidence)], self._of_all):
            counts[0] += taken
            counts[1] += 1
            if counts[1] > _REMEMBERED:
                counts[:] = [count / 2 for count in counts]


class DraftLength:
    """The choice of whether to draft one more token, round by round. Costs are in full depth's steps of a round's rows.

    A draft is worth its cost where it and some that follow it are likelier to be taken than the same time is to give
    tokens otherwise: at the rate of rounds with the best number of drafts g, (1 - a^(g + 1)) / (1 - a) tokens a row for
    g drafts and a pass of g + 1 columns, a being the share that is taken so far. Those that follow count, as a pass may
    take longer for the first column more than for each of the next.

    What drafting may lose is kept account of, by what rounds are expected to take; where they are timed, by the clock's
    word of how far that is off.

    Args:
        record: what drafts have shown.
        seconds: of a pass.
        num_layers: of the model.
        draft_seconds: of a draft's pass, where it is computed otherwise.
    """

    def __init__(
        self, record: DraftRecord, seconds: PassSeconds, num_layers: int, draft_seconds: PassSeconds | None = None
    ) -> None:
        self._record = record
        self._seconds = seconds
        self._draft_seconds = seconds if draft_seconds is None else draft_seconds
        self._num_layers = num_layers
        self._rows = 1
        self._rests = 0.0  # steps of full depth before `rule` is worth asking
        self._each: list[float] = []  # what a row's drafts are expected to cost, one by one

    @property
    def rests(self) -> bool:
        """Whether steps of full depth come first before drafts may be tried again, which `rule` says then, too."""
        return self._rests > 0

    @property
    def has_pace(self) -> bool:
        """Whether it is known what full depth's steps take by now."""
        return self._record.paced >= PACE_STEPS

    def rule(self, rows: int, budgets: Sequence[int]) -> DraftRule:
        """What to draft in a round of so many rows, whose drafts would run so many layers each."""
        rate, taken, spent = self.rate(rows, budgets), self._record.taken(), self._record.beyond
        self._each = []
        for done, budget in enumerate(budgets):
            columns = rows * (done + 1)
            verified = self._cost(self._num_layers, columns + rows) - self._cost(self._num_layers, columns)
            each = self._record.scale * (self._draft_cost(budget) + verified) / rows
            spent += each * rows
            if spent > self._record.may_lose:
                break
            self._each.append(each)
        worth = [rate * _least_cost(self._each[done:], taken) for done in range(len(self._each))]
        if worth and (rate <= rows or worth[0] >= 1):  # one draft, to see whether it still doesn't pay
            worth, self._each = [-1.0], self._each[:1]
        if not worth:
            self._rests = min(_MOST_RESTED, (spent - self._record.may_lose) / MAY_LOSE)
        return DraftRule(worth, _BOUNDS, self._record.shares())

    @property
    def rounds(self) -> int:
        """Rounds with what `rule` said last that may be run before it is asked again."""
        spent = self._record.beyond + self._rows * sum(self._each)
        return max(1, int(min(MOST_ROUNDS, self._record.may_lose / max(spent, 1e-9))))

    @property
    def refused(self) -> float | None:
        """The share of drafts that are refused; None where they say little yet."""
        return 1 - self._record.taken() if self._record.tells else None

    def rate(self, rows: int, budgets: Sequence[int], taken: float | None = None) -> float:
        """Tokens that a round of so many rows is expected to give in the time of a step, as many drafted as pays, with
        such a share of drafts that are taken; None for that of the drafts so far.
        """
        self._rows = rows
        record = self._record
        taken = record.taken() if taken is None else taken
        best = tokens = float(rows)
        step = self._seconds(self._num_layers, rows)
        drafting, share = 0.0, 1.0
        for done, budget in enumerate(budgets, start=1):
            share *= taken
            tokens += rows * share
            drafting += self._draft_seconds(budget, rows)
            drafted = (drafting + self._seconds(self._num_layers, rows * (done + 1))) / step - 1
            best = max(best, tokens / (1 + record.scale * drafted + record.beyond))
        return best

    def learn(
        self,
        outcomes: Sequence[tuple[float, bool]],
        drafts: Sequence[int],
        tokens: int,
        rows: int,
        seconds: float | None = None,
    ) -> None:
        """End a round of full depth's pass.

        Args:
            outcomes: drafts' probabilities and whether they were taken, if that is known.
            drafts: of each row.
            tokens: that the round gave, of all rows.
            rows: that it ran.
            seconds: that it took; None where texts mustn't depend on the clock.
        """
        record, self._rows = self._record, rows
        for confidence, taken in outcomes:
            record.add(confidence, taken)
        took = 1 + sum(sum(self._each[:count]) for count in drafts)
        if any(drafts):
            if seconds is not None and record.pace:
                self._correct(
                    _NEW * min(seconds / self._pace() - took - record.beyond, _STRAY), (took - 1) / record.scale
                )
                record.rounds += 1
                if record.rounds >= _PACE_LASTS:
                    record.rounds = record.paced = 0
            took += record.beyond
        given = tokens / rows
        self._rests -= given
        record.may_lose = min(MOST_HELD, max(-START, record.may_lose + given - took + MAY_LOSE * given))

    def _correct(self, error: float, drafted: float) -> None:
        """Take note that a round whose drafts should have cost so much took so many steps more than was expected."""
        record = self._record
        fixed = max(error, -record.beyond) if record.scale == 1 or error < 0 else 0.0
        record.beyond += fixed
        record.scale = min(1.0, max(_CHEAPEST, record.scale + (error - fixed) / drafted))

    def learn_pace(self, rows: int, steps: int, seconds: float) -> None:
        """End a few steps of so many rows at full depth, without drafts."""
        self._rows = rows
        self._rests -= steps
        self._record.paced += steps
        self._record.pace.append(seconds / steps / self._seconds(self._num_layers, rows))
        self._record.may_lose = min(MOST_HELD, self._record.may_lose + MAY_LOSE * steps)

    def _pace(self) -> float:
        """Seconds of a step of full depth, of the round's rows."""
        return statistics.median(self._record.pace) * self._seconds(self._num_layers, self._rows)

    def _draft_cost(self, layers: int) -> float:
        return self._draft_seconds(layers, self._rows) / self._seconds(self._num_layers, self._rows)

    def _cost(self, layers: int, tokens: int) -> float:
        return self._seconds(layers, tokens) / self._seconds(self._num_layers, self._rows)


def _least_cost(each: Sequence[float], taken: float) -> float:
    """The cost of the next draft, or of the next few, for each that is taken: of as many as cost least."""
    cost, count, share, least = 0.0, 0.0, 1.0, math.inf
    for one in each:
        share *= taken
        cost += one
        count += share
        least = min(least, cost / count)
    return least


def hoped(refused: Sequence[float | None]) -> list[float]:
    """The shares of drafts that are refused of schedules of more and more layers, with a hope where little is known:
    half of that of fewer layers, or twice that of more, so that those are tried which may be better.
    """
    found = [1 - DraftRecord().taken() if share is None else share for share in refused]
    for n in range(1, len(found)):
        found[n] = min(found[n], found[n - 1] / 2) if refused[n] is None else found[n]
    for n in reversed(range(len(found) - 1)):
        found[n] = min(found[n], 2 * found[n + 1]) if refused[n] is None else found[n]
    return found


def pass_seconds(sizes: CostModel, profile: Profile | None, prompt_length: int) -> PassSeconds:
    """The time of a pass by a machine's clock where there is a profile, which knows as many rows as were timed; beyond
    them on the line through the last two of these numbers, and without a profile by bytes and operations.
    """
    predicted = sizes.at(prompt_length=prompt_length)
    if profile is None:
        return functools.cache(lambda layers, tokens: predicted.step_seconds(layers, 0, tokens))
    known = sorted({batch.batch_size for batch in profile.batches})
    measured = profile.at(batch_size=known[-1], prompt_length=prompt_length)

    @functools.cache
    def seconds(layers: int, tokens: int) -> float:
        timed = min(tokens, known[-1])
        last = measured.step_seconds(layers, 0, timed)
        found = last * predicted.step_seconds(layers, 0, tokens) / predicted.step_seconds(layers, 0, timed)
        if tokens > timed and len(known) > 1:
            row = (last - measured.step_seconds(layers, 0, known[-2])) / (timed - known[-2])
            found = max(found, last + row * (tokens - timed))
        return found

    return seconds
