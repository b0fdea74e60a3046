"""The speed of lossless decoding, predicted: how often drafts are taken, and what rounds of them take here."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import StoppingCriteriaList

from eval.console import bar_columns
from eval.decoding import spread_over_lengths
from eval.systems.base import SkipSystem
from skipdecode import SkipSchedule, skip_generate
from skipdecode.clock import StepClock
from skipdecode.cost import interpolated
from skipdecode.draft_length import MOST_DRAFTS, lossless_speed
from skipdecode.lean import draft_decoder, lean_decoder
from skipdecode.lossless import DraftCounts
from skipdecode.native_steps import DraftRule, TextsAtHand
from skipdecode.runners import ColumnsRunner, why_not_lean_steps

PROMPTS = 64  # whose texts are decoded
STEPS = 4  # of full depth that are timed together
REPEATS = 15  # of each timing
BEGUN, SHORT = 12, 8  # texts that are begun, and their decode steps
_COUNTS = (1, 2, 3, 4, 6, 8, MOST_DRAFTS)  # of drafts in the rounds that are timed


@torch.no_grad()
def predict_lossless(
    system: SkipSystem, prompts: Sequence[Sequence[int]], lengths: Sequence[int], console: Console
) -> float | None:
    """The speed of decoding full depth's texts over full depth alone, one text at a time, as `system` drafts them.

    Of texts from all over the test set, every place is drafted once behind full depth's own keys and values. Rounds of
    so many drafts and their verification are timed on one of these texts, in turns.

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
    taken: list[list[bool]] = [[] for _ in range(lengths[longest] - 1)]  # by place in a text
    with Progress(
        *bar_columns(), MofNCompleteColumn(), TextColumn("texts"), TimeElapsedColumn(), console=console
    ) as bar:
        for n in bar.track(drawn, description=f"drafts at {system.label}"):
            for place, same in enumerate(drafts_taken(system, prompts[n], lengths[n])):
                taken[place].append(same)
    rounds = time_rounds(system, prompts[longest], lengths[longest] // 2)
    start = time_starts(system, [prompts[n] for n in drawn[:: -(-len(drawn) // BEGUN)]], rounds)
    shares = [statistics.fmean(outcomes) for outcomes in taken]
    tokens = [n - 1 for n in lengths if n > 1]
    return lossless_speed(shares, lambda drafts: interpolated(rounds, drafts), tokens, start)


def drafts_taken(system: SkipSystem, prompt: Sequence[int], length: int) -> list[bool]:
    """For each token but the first of full depth's greedy text of a prompt, whether a draft of it would be taken."""
    runner, token = _runner(system, prompt, length)
    found = []
    for place in range(length - 1):
        (draft,) = runner.run(token, [place], [1], system.schedule.layers_at(place)).argmax(dim=-1).tolist()
        token = runner.run(token, [place], [1]).argmax(dim=-1)  # over what the draft wrote
        found.append(draft == int(token))
    return found


def time_rounds(system: SkipSystem, prompt: Sequence[int], place: int) -> dict[int, float]:
    """Drafts in a round -> its time behind so many generated tokens, in decode steps of full depth; medians."""
    runner, token = _runner(system, prompt, place + max(MOST_DRAFTS, STEPS) + 1)
    for step in range(place):
        token = runner.run(token, [step], [1]).argmax(dim=-1)

    def steps() -> None:
        at_hand = TextsAtHand(token, [0], [place], [STEPS], ())
        if runner.choose(at_hand, STEPS) is None:
            chosen = token
            for step in range(STEPS):
                chosen = runner.run(chosen, [place + step], [1]).argmax(dim=-1)
            chosen.tolist()

    def drafts(count: int) -> None:
        layers = [system.schedule.layers_at(place + n) for n in range(count)]
        at_hand = TextsAtHand(token, [0], [place], [count + 1], ())
        # However unlikely one is, it is drafted.
        if runner.draft(at_hand, layers, DraftRule([-1.0] * count, (1.0,), [1.0]), 1) is None:
            drafted = [token]
            for n, chosen in enumerate(layers):
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


def time_starts(system: SkipSystem, prompts: Sequence[Sequence[int]], rounds: Mapping[int, float]) -> float:
    """What lossless texts take once more than those of full depth, beyond their `rounds`, in steps of full depth: the
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
                drafts = counts.drafted / counts.rounds
                found.append(seconds[1] / seconds[0] * SHORT - counts.rounds * interpolated(rounds, drafts))
    return statistics.median(found)


def _runner(system: SkipSystem, prompt: Sequence[int], length: int) -> tuple[ColumnsRunner, torch.Tensor]:
    """What decodes behind a prompt, as lossless decoding does, and full depth's first token."""
    checkpoint = system.checkpoint
    decoder = lean_decoder(checkpoint.model, checkpoint.weights)
    ids = torch.tensor([list(prompt)], device=checkpoint.model.device)
    runner = ColumnsRunner(decoder, ids, length, {})
    runner.draft_with(draft_decoder(checkpoint.model, decoder, system.schedule.layers_at(0)))
    return runner, runner.prefill(ids).argmax(dim=-1)
