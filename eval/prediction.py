"""The speed of lossless decoding, predicted: how often drafts are taken, and what rounds of them take here."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from eval.console import bar_columns
from eval.decoding import spread_over_lengths
from eval.systems.base import SkipSystem
from skipdecode import SkipSchedule, skip_generate
from skipdecode.clock import StepClock
from skipdecode.cost import interpolated
from skipdecode.decode import lossless_costs
from skipdecode.draft_length import MOST_DRAFTS, DraftLength, DraftRecord
from skipdecode.lean import draft_decoder, lean_decoder
from skipdecode.lossless import DraftCounts, LosslessLoop
from skipdecode.native_steps import ChosenTokens, DraftedRounds, DraftRule, TextsAtHand
from skipdecode.runners import ColumnsRunner, why_not_lean_steps

PROMPTS = 64  # whose texts are decoded
STEPS = 4  # of full depth that are timed together
REPEATS = 20  # of each timing
BEGUN, SHORT = 12, 8  # texts that are begun, and their decode steps
CHAIN = 8  # drafts that are recorded behind each other
DEPTHS = 4  # of drafts that are recorded, of a schedule that has more
_END, _GOES_ON = range(2)  # the tokens of a text that is known
_COUNTS = (1, 2, 3, 4, 6, 8, MOST_DRAFTS)  # of drafts in the rounds that are timed


class Draft(NamedTuple):
    """What a draft of a token showed: its probability, and whether full depth chose it too."""

    probability: float
    agrees: bool


# layers that a text's tokens were drafted by -> the draft of each token but the first
RecordedDrafts = Mapping[int, Sequence[Draft]]
# layers that draft -> drafts of a round -> its time, in steps of full depth
RoundTimes = Mapping[int, Mapping[int, float]]


@torch.no_grad()
def predict_lossless(
    system: SkipSystem, prompts: Sequence[Sequence[int]], lengths: Sequence[int], console: Console
) -> float | None:
    """The speed of decoding full depth's texts over full depth alone, one text at a time, as `system` drafts them: the
    median over texts, as speeds are measured.

    Of texts from all over the test set, every place is drafted behind full depth's own keys and values. Rounds of so
    many drafts and their verification are timed on one of these texts, in turns. Lossless decoding's own loop then runs
    these texts again, twice, as if it had them from passes that took as long.

    Args:
        system: whose schedule drafts.
        prompts: token ids.
        lengths: tokens of full depth's text behind each prompt, its end token included.
        console: for the progress bar.

    Returns:
        None where steps can't be lean, which drafts need, and where no text has a decode step.
    """
    model = system.checkpoint.model
    if why_not_lean_steps(model, model.generation_config, False, {}) is not None:
        return None
    drawn = [n for n in spread_over_lengths(list(map(len, prompts)), PROMPTS) if lengths[n] > 1]
    if not drawn:
        return None
    longest = max(drawn, key=lambda n: lengths[n])
    used = sorted({system.schedule.budget(place) for place in range(lengths[longest] - 1)})
    budgets = sorted({used[n * (len(used) - 1) // max(1, DEPTHS - 1)] for n in range(DEPTHS)})
    with Progress(
        *bar_columns(), MofNCompleteColumn(), TextColumn("texts"), TimeElapsedColumn(), console=console
    ) as bar:
        texts = [
            record_drafts(system, prompts[n], lengths[n], budgets)
            for n in bar.track(drawn, description=f"drafts at {system.label}")
        ]
    timed = {
        layers: time_rounds(system, prompts[longest], lengths[longest] // 2, layers)
        for layers in budgets[:: len(budgets) - 1 or 1]
    }
    start = time_starts(system, [prompts[n] for n in drawn[:: -(-len(drawn) // BEGUN)]], timed)
    decoder = lean_decoder(model, system.checkpoint.weights)
    costs = lossless_costs(model, decoder, len(prompts[longest]))
    length = DraftLength(DraftRecord(), costs[0], system.checkpoint.num_layers, costs[1])
    many = decoder.choosing(1) is not None
    return statistics.median(play_texts(texts, system.schedule, length, timed, start, many_rounds=many))


def record_drafts(
    system: SkipSystem, prompt: Sequence[int], length: int, budgets: Sequence[int]
) -> dict[int, list[Draft]]:
    """Draft each token but the first of full depth's greedy text of a prompt, by so many layers."""
    runner, last = _runner(system, prompt, length)
    found: dict[int, list[Draft]] = {layers: [] for layers in budgets}
    for start in range(0, length - 1, CHAIN):
        text = [last]  # of full depth
        for place in range(start, min(start + CHAIN, length - 1)):
            text.append(runner.run(text[-1], [place], [1]).argmax(dim=-1))
        for layers, drafts in found.items():
            for n, token in enumerate(text[:-1]):
                logits = runner.run(token, [start + n], [1], system.schedule.layers_for(layers))
                probability, draft = torch.softmax(logits[0].float(), dim=-1).max(dim=-1)
                drafts.append(Draft(float(probability), bool(draft == text[n + 1])))
        runner.run(torch.cat(text[:-1]), [start], [len(text) - 1])  # over what the drafts wrote
        last = text[-1]
    return found


def play_texts(
    texts: Sequence[RecordedDrafts],
    schedule: SkipSchedule,
    length: DraftLength,
    timed: RoundTimes,
    start: float = 0.0,
    *,
    many_rounds: bool,
) -> list[float]:
    """Times that lossless decoding is faster than full depth, for each text, where its drafts are known.

    Args:
        texts: of a token or more beyond the first.
        schedule: that drafts.
        length: says how much to draft, and learns from it.
        timed: the time of rounds.
        start: what a text takes once beyond its rounds, more than full depth, in steps of that.
        many_rounds: whether kernels run several rounds in a call.
    """
    speeds: list[float] = []
    for _ in range(2):  # texts are short: what drafts have shown is that of many
        speeds = [
            len(next(iter(text.values()))) / (start + _play(text, schedule, length, timed, many_rounds=many_rounds))
            for text in texts
        ]
    return speeds


def _play(
    drafts: RecordedDrafts, schedule: SkipSchedule, length: DraftLength, timed: RoundTimes, *, many_rounds: bool
) -> float:
    """The time that lossless decoding's loop takes with a text whose drafts are known, in steps of full depth."""
    runner: Any = RecordedRunner(drafts, schedule.num_layers, timed, many_rounds=many_rounds)
    room = 2 + runner.tokens + MOST_DRAFTS  # the last of a text is its end token, which is drafted too
    LosslessLoop(
        runner,
        schedule,
        length,
        torch.tensor([[_GOES_ON]]),
        logits_processor=LogitsProcessorList(),
        stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(room), EosTokenCriteria(_END)]),
        generation_config=GenerationConfig(max_length=room, eos_token_id=_END, pad_token_id=_END),
        streamer=None,
        clock=lambda: runner.steps,
    ).run()
    return float(runner.steps)


class RecordedRunner:
    """What a `ColumnsRunner` is to lossless decoding's loop, for one text that is known, on a clock of its own.

    Attributes:
        tokens: that the text has beyond the first.
        steps: the time by now, in steps of full depth.
        all_layers: of the model.
    """

    def __init__(self, drafts: RecordedDrafts, num_layers: int, timed: RoundTimes, *, many_rounds: bool) -> None:
        self.tokens = len(next(iter(drafts.values())))
        self.steps = 0.0
        self.all_layers = range(num_layers)
        self._drafts, self._timed, self._many = drafts, timed, many_rounds

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """The first token."""
        return torch.nn.functional.one_hot(torch.tensor([_GOES_ON]), 2).float()

    def choose(self, texts: TextsAtHand, steps: int) -> ChosenTokens:
        """So many steps of full depth."""
        count = min(steps, self.tokens - texts.starts[0])
        self.steps += count
        return self._chosen(texts.starts[0], count)

    def draft(self, texts: TextsAtHand, layers: Sequence[Sequence[int]], rule: DraftRule, rounds: int) -> DraftedRounds:
        """Rounds as the kernels run them."""
        budgets = [len(each) for each in layers]
        place = start = texts.starts[0]
        drafted: list[list[int]] = []
        agreed: list[list[int]] = []
        probabilities: list[list[list[float]]] = []
        while place < self.tokens and len(drafted) < (rounds if self._many else 1):
            found: list[Draft] = []
            reach = 1.0
            for at, budget, least in zip(range(place, self.tokens), budgets, rule.worth, strict=False):
                if reach <= least:
                    break
                found.append(self._drafts[min(self._drafts, key=lambda layers: abs(layers - budget))][at])
                reach *= rule.share(found[-1].probability)
            same = next((n for n, draft in enumerate(found) if not draft.agrees), len(found))
            self.steps += round_steps(self._timed, len(found), sum(budgets[: len(found)]))
            drafted.append([len(found)])
            agreed.append([same])
            probabilities.append([[draft.probability] for draft in found])
            place = min(self.tokens, place + same + 1)
        return DraftedRounds(self._chosen(start, place - start), drafted, agreed, probabilities)

    def roll_back(self, steps: int) -> None:
        """Nothing is held."""

    def _chosen(self, start: int, count: int) -> ChosenTokens:
        tokens = torch.full((1, count), _GOES_ON)
        if start + count == self.tokens:
            tokens[0, -1] = _END
        return ChosenTokens(tokens, [count])


def round_steps(timed: RoundTimes, drafts: float, layers: float) -> float:
    """The time of a round of so many drafts, which run so many layers in all, in steps of full depth."""
    each = min(max(layers / drafts if drafts else 0.0, min(timed)), max(timed))
    return interpolated({depth: interpolated(times, drafts) for depth, times in timed.items()}, each)


def time_rounds(system: SkipSystem, prompt: Sequence[int], place: int, layers: int) -> dict[int, float]:
    """Drafts in a round -> its time behind so many generated tokens, in decode steps of full depth; medians.

    The drafts run so many layers each.
    """
    runner, token = _runner(system, prompt, place + max(MOST_DRAFTS, STEPS) + 1)
    for step in range(place):
        token = runner.run(token, [step], [1]).argmax(dim=-1)

    chosen = system.schedule.layers_for(layers)

    def steps() -> None:
        at_hand = TextsAtHand(token, [0], [place], [STEPS], ())
        if runner.choose(at_hand, STEPS) is None:
            last = token
            for step in range(STEPS):
                last = runner.run(last, [place + step], [1]).argmax(dim=-1)
            last.tolist()

    def drafts(count: int) -> None:
        at_hand = TextsAtHand(token, [0], [place], [count + 1], ())
        # However unlikely one is, it is drafted.
        if runner.draft(at_hand, [chosen] * count, DraftRule([-1.0] * count, (1.0,), [1.0]), 1) is None:
            drafted = [token]
            for n in range(count):
                drafted.append(runner.run(drafted[-1], [place + n], [1], chosen).argmax(dim=-1))
            runner.run(torch.cat(drafted), [place], [count + 1]).argmax(dim=-1).tolist()

    seconds: dict[int, list[float]] = {0: [], **{count: [] for count in _COUNTS}}
    for repeat in range(REPEATS + 1):
        for count, found in seconds.items():
            runner.roll_back(place)
            start = time.perf_counter()
            drafts(count) if count else steps()
            if repeat:  # the first warms up
                found.append(time.perf_counter() - start)
    full = [found / STEPS for found in seconds.pop(0)]
    return {0: 1.0} | {
        count: statistics.median(one / step for one, step in zip(found, full, strict=True))
        for count, found in seconds.items()
    }


def time_starts(system: SkipSystem, prompts: Sequence[Sequence[int]], timed: RoundTimes) -> float:
    """What lossless texts take once more than those of full depth, beyond their rounds as timed, in steps of it: the
    median over short texts behind `prompts`. It is what lies between rounds, and weights that caches don't hold yet.
    """
    model: Any = system.checkpoint.model
    found = []
    full: dict[str, Any] = {"schedule": SkipSchedule.full_depth(system.checkpoint.num_layers)}
    for again in range(2):
        for prompt in prompts:
            counts = DraftCounts()
            lossless = {"schedule": system.schedule, "lossless": True, "draft_counts": counts}
            seconds = []
            for how in (full, lossless):
                ids, clock = torch.tensor([list(prompt)], device=model.device), StepClock(model.device)
                model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    custom_generate=skip_generate,
                    weights=system.checkpoint.weights,
                    max_new_tokens=SHORT + 1,
                    do_sample=False,
                    eos_token_id=None,
                    stopping_criteria=StoppingCriteriaList([clock]),
                    **how,
                )
                seconds.append(clock.decode_seconds)
            if again:  # the first warms up
                layers = counts.layers - counts.rounds * system.checkpoint.num_layers  # of drafts
                each = round_steps(timed, counts.drafted / counts.rounds, layers / counts.rounds)
                found.append(seconds[1] / seconds[0] * SHORT - counts.rounds * each)
    return statistics.median(found)


def _runner(system: SkipSystem, prompt: Sequence[int], length: int) -> tuple[ColumnsRunner, torch.Tensor]:
    """What decodes behind a prompt, as lossless decoding does, and full depth's first token."""
    checkpoint = system.checkpoint
    decoder = lean_decoder(checkpoint.model, checkpoint.weights)
    ids = torch.tensor([list(prompt)], device=checkpoint.model.device)
    runner = ColumnsRunner(decoder, ids, length, {})
    runner.draft_with(draft_decoder(checkpoint.model, decoder, system.schedule.layers_at(0)))
    return runner, runner.prefill(ids).argmax(dim=-1)
