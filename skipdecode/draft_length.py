"""How many tokens to draft before full depth verifies: by what passes cost, and how often drafts were taken so far."""

import weakref
from collections.abc import Callable, Sequence

from skipdecode.cost import CostModel
from skipdecode.lean import LeanDecoder
from skipdecode.profile import Profile
from skipdecode.schedule import SkipSchedule

MOST_DRAFTS = 12  # of a row in a round
# What drafting may lose before it has won anything, how much of it is held against bad times, both in steps of full
# depth; and the share of full depth's time that may be lost for ever: what drafts are tried with where they don't pay.
START, MOST_HELD, MAY_LOSE = 1.0, 4.0, 0.02
# Drafts of like confidence are taken alike: up to each of these probabilities, how often at first guess.
_GUESSES = {0.3: 0.3, 0.5: 0.5, 0.7: 0.7, 0.9: 0.85, 1.0: 0.95}
_GUESSED = 4.0  # drafts that a guess counts for
_REMEMBERED = 256.0  # drafts, beyond which the older ones fade

# layers and tokens of a pass -> seconds
PassSeconds = Callable[[int, int], float]


class DraftRecord:
    """The drafts of one model and schedule so far: how many were taken, and what drafting may still lose."""

    def __init__(self) -> None:
        self._of_all = [0.8 * _GUESSED, _GUESSED]  # taken, of how many
        self._by_confidence = {most: [guess * _GUESSED, _GUESSED] for most, guess in _GUESSES.items()}
        self.may_lose = START

    def taken(self, confidence: float | None = None) -> float:
        """The share of drafts that are taken: of all, or of those that had such a probability."""
        taken, count = self._of_all if confidence is None else self._by_confidence[_kind(confidence)]
        return taken / count

    def add(self, confidence: float, taken: bool) -> None:
        """Count one draft."""
        for counts in (self._by_confidence[_kind(confidence)], self._of_all):
            counts[0] += taken
            counts[1] += 1
            if counts[1] > _REMEMBERED:
                counts[:] = [count / 2 for count in counts]


def _kind(confidence: float) -> float:
    return next(most for most in _GUESSES if confidence <= most or most == 1.0)


class DraftLength:
    """The choice of whether to draft one more token, round by round. Costs are in full depth's steps of a round's rows.

    A draft is worth its cost where it is likelier to be taken than the same time is to give a token otherwise: at the
    rate of rounds with the best number of drafts g, (1 - a^(g + 1)) / (1 - a) tokens a row for g drafts and a pass of
    g + 1 columns, a being the share that is taken so far.

    Args:
        record: what drafts have shown.
        seconds: of a pass.
        num_layers: of the model.
    """

    def __init__(self, record: DraftRecord, seconds: PassSeconds, num_layers: int) -> None:
        self._record = record
        self._seconds = seconds
        self._num_layers = num_layers
        self._known: dict[tuple[int, int], float] = {}
        self._rows, self._rate, self._pays, self._spent = 1, 1.0, False, 0.0

    def start(self, rows: int, budgets: Sequence[int]) -> None:
        """Begin a round of so many rows, whose drafts would run so many layers each."""
        self._spent = 0.0
        self._rate = self.rate(rows, budgets)
        self._pays = self._rate > rows

    def rate(self, rows: int, budgets: Sequence[int]) -> float:
        """Tokens that a round of so many rows is expected to give in the time of a step, as many drafted as pays."""
        self._rows = rows
        best = tokens = float(rows)
        cost, share = 0.0, 1.0
        for done, budget in enumerate(budgets, start=1):
            share *= self._record.taken()
            tokens += rows * share
            cost += self._cost(budget, rows)
            rate = tokens / (cost + self._cost(self._num_layers, rows * (done + 1)))
            if rate <= best:  # each draft gains less than the one before
                break
            best = rate
        return best

    def worth(self, reach: Sequence[float], done: int, budget: int) -> list[bool]:
        """For each row that has `done` drafts, all of them taken with probability `reach`, whether to draft one more.

        A row that is told no isn't asked about again in the round.
        """
        columns = self._rows * (done + 1)
        verified = self._cost(self._num_layers, columns + 1) - self._cost(self._num_layers, columns)
        each = self._cost(budget, len(reach)) / len(reach) + verified
        if self._pays:
            found = [share * self._record.taken() > self._rate * each for share in reach]
        else:
            found = [done == 0] * len(reach)  # to see whether it still doesn't
        if self._spent + each * sum(found) > self._record.may_lose:
            return [False] * len(reach)
        self._spent += each * sum(found)
        return found

    def learn(self, outcomes: Sequence[tuple[float, bool]], tokens: int) -> None:
        """End a round that gave so many tokens: drafts' probabilities and whether they were taken, if that is known."""
        for confidence, taken in outcomes:
            self._record.add(confidence, taken)
        won = tokens / self._rows - 1 - self._spent
        self._record.may_lose = min(MOST_HELD, self._record.may_lose + won + MAY_LOSE * tokens / self._rows)

    def reach(self, confidence: float) -> float:
        """How likely a draft of such a probability is taken, if those before it are."""
        return self._record.taken(confidence)

    def _cost(self, layers: int, tokens: int) -> float:
        return self._pass_seconds(layers, tokens) / self._pass_seconds(self._num_layers, self._rows)

    def _pass_seconds(self, layers: int, tokens: int) -> float:
        if (layers, tokens) not in self._known:
            self._known[layers, tokens] = self._seconds(layers, tokens)
        return self._known[layers, tokens]


def lossless_speed(taken: float, draft: float, verify: Callable[[int], float]) -> float:
    """Times that lossless decoding is faster than full depth, with the best number of drafts a round.

    (1 - a^(g + 1)) / (1 - a) / (g c + V(g + 1)), as in Leviathan et al. 2023, with a pass of several columns counted
    as what it costs. Without drafts it is 1.

    Args:
        taken: a, the share of drafts that full depth takes.
        draft: c, the cost of a draft's step, in steps of full depth.
        verify: V, that of a pass of full depth through so many columns a row.
    """
    tokens = [sum(taken**n for n in range(drafts + 1)) for drafts in range(MOST_DRAFTS + 1)]
    return max(count / (drafts * draft + verify(drafts + 1)) for drafts, count in enumerate(tokens))


# decoder -> schedule -> what its drafts have shown
_RECORDS: weakref.WeakKeyDictionary[LeanDecoder, dict[SkipSchedule, DraftRecord]] = weakref.WeakKeyDictionary()


def draft_record(decoder: LeanDecoder, schedule: SkipSchedule, *, do_sample: bool) -> DraftRecord:
    """What earlier calls have shown, for greedy texts, which don't depend on it; for sampled ones a new record, so that
    a seed gives the same text in every call.
    """
    return DraftRecord() if do_sample else _RECORDS.setdefault(decoder, {}).setdefault(schedule, DraftRecord())


def pass_seconds(sizes: CostModel, profile: Profile | None, prompt_length: int) -> PassSeconds:
    """The time of a pass by a machine's clock where there is a profile, which knows as many rows as were timed; beyond
    them, and without one, by bytes and operations.
    """
    predicted = sizes.at(prompt_length=prompt_length)
    if profile is None:
        return lambda layers, tokens: predicted.step_seconds(layers, 0, tokens)
    measured = profile.at(batch_size=max(batch.batch_size for batch in profile.batches), prompt_length=prompt_length)

    def seconds(layers: int, tokens: int) -> float:
        timed = min(tokens, measured.batch_size)
        beyond = predicted.step_seconds(layers, 0, tokens) / predicted.step_seconds(layers, 0, timed)
        return measured.step_seconds(layers, 0, timed) * beyond

    return seconds
