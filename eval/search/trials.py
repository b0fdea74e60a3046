"""The trials of a search: schedules take turns on batches of validation data, and the worse ones are dropped."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data import Example, Task
from eval.console import bar_columns, make_console
from eval.decoding import decode_test_set
from eval.journal import Journal
from eval.search.paired import Items, corpus_score, sentence_statistics
from eval.systems.base import Checkpoint
from skipdecode import SkipSchedule

FULL_DEPTH = -1  # the trial number of full depth; 0 is the default schedule
MIN_PROMPTS = 64  # in the first rung: on fewer, the selection would be random
RUNGS = 3
MIN_KEPT = 3  # schedules besides the default that are always tried on all prompts


@dataclass(frozen=True)
class TrialResult:
    """The statistics and the time of one schedule on one batch.

    Attributes:
        trial: the number of the schedule.
        statistics: the statistics of each prompt (`eval.search.paired`).
        seconds_per_step: None where the batch ended with its first token.
        layers: the sum of layers over all generated tokens of the batch.
        tokens: the number of these tokens.
    """

    trial: int
    statistics: Items
    seconds_per_step: float | None
    layers: float
    tokens: int


@dataclass(frozen=True)
class Batch:
    """A batch and its results for all schedules still in the search. `prompts` are indices into the data."""

    prompts: list[int]
    results: list[TrialResult]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Batch":
        """The batch with these fields."""
        return cls(values["prompts"], [TrialResult(**result) for result in values["results"]])


@dataclass(frozen=True)
class Validation:
    """A checkpoint, and validation data with the token ids of its prompts."""

    checkpoint: Checkpoint
    task: Task
    examples: Sequence[Example]
    prompts: Sequence[list[int]]
    batch_size: int
    max_new_tokens: int
    metric: str
    tokenizer: str | None = None  # of the words that the metric counts; None: the metric's own

    def take_turns(
        self, batches: Sequence[list[int]], schedules: Sequence[tuple[int, SkipSchedule]]
    ) -> Iterator[list[TrialResult]]:
        """Decode batches (of `batch_size` prompts, the last may be smaller, in order of length) under schedules."""
        order = [n for batch in batches for n in batch]
        results = decode_test_set(
            self.checkpoint,
            self.task,
            [self.examples[n] for n in order],
            [self.prompts[n] for n in order],
            [schedule for _, schedule in schedules],
            batch_size=self.batch_size,
            max_new_tokens=self.max_new_tokens,
        )
        at = 0
        for batch, decoded in zip(batches, results, strict=True):
            references = [self.examples[n].references for n in batch]
            trial_results = []
            for (number, _), one in zip(schedules, decoded, strict=True):
                texts, last = one.predictions[at : at + len(batch)], one.turns[-1]
                statistics = sentence_statistics(self.metric, texts, references, self.task.convention, self.tokenizer)
                seconds = last.decode_seconds / last.steps if last.steps else None
                trial_results.append(TrialResult(number, statistics, seconds, last.layers, last.tokens))
            yield trial_results
            at += len(batch)


def rung_ends(prompts: int, batch_size: int) -> list[int]:
    """The number of prompts decoded at the end of each rung: all, half, a quarter; at least MIN_PROMPTS and a batch.

    >>> rung_ends(600, batch_size=32)
    [150, 300, 600]
    >>> rung_ends(100, batch_size=32)
    [100]
    """
    ends = [prompts]
    while len(ends) < RUNGS and ends[0] // 2 >= max(MIN_PROMPTS, batch_size):
        ends.insert(0, ends[0] // 2)
    return ends


def plan_rungs(lengths: Sequence[int], batch_size: int, seed: int) -> list[list[list[int]]]:
    """The batches of each rung as indices into the data: prompts are shuffled, then batched by length.

    Args:
        lengths: the lengths of the prompts, in tokens.
        batch_size: the number of prompts in a batch.
        seed: the seed of the shuffle.
    """
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    rungs, start = [], 0
    for end in rung_ends(len(order), batch_size):
        part = sorted(order[start:end], key=lambda n: lengths[n])
        rungs.append([part[at : at + batch_size] for at in range(0, len(part), batch_size)])
        start = end
    return rungs


def statistics_of(batches: Sequence[Batch], trial: int) -> Items:
    """The statistics of a trial, a row for each prompt, in the order of decoding."""
    return [row for batch in batches for result in batch.results if result.trial == trial for row in result.statistics]


def better_half(batches: Sequence[Batch], metric: str) -> list[int]:
    """The trials to keep: the default, and the better half of the others in the last batch."""
    others = [result.trial for result in batches[-1].results if result.trial not in (0, FULL_DEPTH)]
    ranked = sorted(others, key=lambda trial: (-corpus_score(metric, statistics_of(batches, trial)), trial))
    return [0, *sorted(ranked[: max(MIN_KEPT, -(-len(others) // 2))])]


def run_trials(schedules: Sequence[SkipSchedule], data: Validation, journal: Journal, seed: int) -> list[Batch]:
    """Try schedules (default first) and full depth; batches in the journal aren't decoded again.

    Successive halving (Jamieson and Talwalkar, arXiv 1502.07943) over prompts: after each rung but the last, the worse
    half of the schedules is dropped; the others continue with new prompts.
    """
    rungs = plan_rungs(list(map(len, data.prompts)), data.batch_size, seed)
    full_depth = SkipSchedule.full_depth(schedules[0].num_layers, schedules[0].horizon)
    kept = list(range(len(schedules)))
    done: list[Batch] = []
    with _progress() as progress:
        bar = progress.add_task("", total=_work(rungs, len(schedules)))
        for number, batches in enumerate(rungs, 1):
            if number > 1:
                kept = better_half(done, data.metric)
            progress.update(bar, description=f"rung {number} of {len(rungs)}: {len(kept)} schedules")
            trials = [(FULL_DEPTH, full_depth), *((trial, schedules[trial]) for trial in kept)]
            keyed = [(("batch", str(len(done) + n)), batch) for n, batch in enumerate(batches)]
            known = [Batch.from_dict(journal[key]) for key, _ in keyed if key in journal]
            done += known
            progress.advance(bar, len(known) * len(trials))
            new = keyed[len(known) :]
            if new:
                turns = data.take_turns([batch for _, batch in new], trials)
                for (key, batch), results in zip(new, turns, strict=True):
                    done.append(Batch(batch, results))
                    journal.add(key, asdict(done[-1]))
                    progress.advance(bar, len(trials))
    return done


def _work(rungs: Sequence[Sequence[list[int]]], schedules: int) -> int:
    """The number of batches to decode, counted for each schedule and for full depth."""
    total, others = 0, schedules - 1
    for batches in rungs:
        total += len(batches) * (others + 2)
        others = min(others, max(MIN_KEPT, -(-others // 2)))
    return total


def _progress() -> Progress:
    columns = (*bar_columns(), MofNCompleteColumn(), TextColumn("schedules x batches"))
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=make_console(stderr=True))
