"""The trials of a search: schedules that take turns on batches of validation data, fewer schedules as batches go by."""

import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data import Example, Task
from eval.console import bar_columns, make_console
from eval.decoding import decode_test_set
from eval.search.paired import Items, corpus_score, sentence_statistics
from skipdecode import ConfigError, SkipSchedule
from skipdecode.projections import Weights

FILE_NAME = "trials.jsonl"
FULL_DEPTH = -1  # full depth's number beside those of the trials, the first of which, 0, is the default schedule
LEAST = 64  # prompts in the first rung: on fewer, chance decides which half of the schedules goes on
RUNGS = 3
KEPT = 3  # schedules beside the default that are always tried on all prompts


@dataclass(frozen=True)
class Turn:
    """What one schedule made of one batch.

    Attributes:
        trial: its number.
        statistics: of each prompt, as `eval.search.paired` gives them.
        seconds_per_step: None where the batch ended with its first token.
        layers, tokens: layers run by generated tokens, and these tokens, over the rows of the batch.
    """

    trial: int
    statistics: Items
    seconds_per_step: float | None
    layers: int
    tokens: int


@dataclass(frozen=True)
class Batch:
    """A batch that every schedule which was still in the search has decoded. `prompts` are places in the data."""

    prompts: list[int]
    turns: list[Turn]


@dataclass(frozen=True)
class Validation:
    """What schedules are tried on: a model, and validation data with the token ids of its prompts."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    task: Task
    examples: Sequence[Example]
    prompts: Sequence[list[int]]
    batch_size: int
    max_new_tokens: int
    weights: Weights
    metric: str

    def take_turns(
        self, batches: Sequence[list[int]], schedules: Sequence[tuple[int, SkipSchedule]]
    ) -> Iterator[list[Turn]]:
        """Decode batches (of `batch_size` prompts, the last of fewer, in order of length) under numbered schedules."""
        order = [n for batch in batches for n in batch]
        results = decode_test_set(
            self.model,
            self.tokenizer,
            self.task,
            [self.examples[n] for n in order],
            [self.prompts[n] for n in order],
            [schedule for _, schedule in schedules],
            batch_size=self.batch_size,
            max_new_tokens=self.max_new_tokens,
            weights=self.weights,
        )
        at = 0
        for batch, decoded in zip(batches, results, strict=True):
            references = [self.examples[n].references for n in batch]
            turns = []
            for (number, _), one in zip(schedules, decoded, strict=True):
                texts, last = one.predictions[at : at + len(batch)], one.turns[-1]
                statistics = sentence_statistics(self.metric, texts, references)
                turns.append(Turn(number, statistics, one.seconds_per_step[-1], last.layers, last.tokens))
            yield turns
            at += len(batch)


@dataclass
class TrialLog:
    """`trials.jsonl`: a line for each batch, on the disk before the next one starts.

    A line that was cut off by the end of a process is dropped. Raises ConfigError where another line can't be read.
    """

    path: Path
    batches: list[Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.path.exists():
            return
        *lines, torn = self.path.read_bytes().split(b"\n")
        if torn:
            with self.path.open("r+b") as stream:
                stream.truncate(self.path.stat().st_size - len(torn))
        for number, line in enumerate(lines, 1):
            try:
                values = json.loads(line)
                turns = [Turn(**turn) for turn in values["turns"]]
                self.batches.append(Batch(values["prompts"], turns))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{self.path}, line {number}, is damaged ({error}): remove the folder") from error

    def append(self, batch: Batch) -> None:
        """Write a batch down for good."""
        with self.path.open("ab") as stream:
            stream.write((json.dumps(asdict(batch)) + "\n").encode())
            stream.flush()
            os.fsync(stream.fileno())
        self.batches.append(batch)


def rung_ends(prompts: int, batch_size: int) -> list[int]:
    """How many of the prompts are decoded when each rung ends: all, and halves before, none below LEAST or a batch.

    >>> rung_ends(600, batch_size=32)
    [150, 300, 600]
    >>> rung_ends(100, batch_size=32)
    [100]
    """
    ends = [prompts]
    while len(ends) < RUNGS and ends[0] // 2 >= max(LEAST, batch_size):
        ends.insert(0, ends[0] // 2)
    return ends


def plan_rungs(lengths: Sequence[int], batch_size: int, seed: int) -> list[list[list[int]]]:
    """The batches of each rung, as places in the data: prompts drawn at random, then batched with those of like length.

    Args:
        lengths: of the prompts, in tokens.
        batch_size: prompts in a batch.
        seed: of the order.
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
    """The statistics of a trial, a row for each prompt that it was tried on, in the order in which they came."""
    return [row for batch in batches for turn in batch.turns if turn.trial == trial for row in turn.statistics]


def better_half(batches: Sequence[Batch], metric: str) -> list[int]:
    """The trials that go on: the default, and the better half of the others that took part in the last batch."""

    others = [turn.trial for turn in batches[-1].turns if turn.trial not in (0, FULL_DEPTH)]
    ranked = sorted(others, key=lambda trial: (-corpus_score(metric, statistics_of(batches, trial)), trial))
    return [0, *sorted(ranked[: max(KEPT, -(-len(others) // 2))])]


def run_trials(schedules: Sequence[SkipSchedule], data: Validation, log: TrialLog, seed: int) -> list[Batch]:
    """Try schedules, the default first, beside full depth; what the log holds already isn't decoded again.

    Successive halving (Jamieson and Talwalkar, arXiv 1502.07943) over prompts: after each rung but the last, the worse
    half of the schedules leaves; the others decode only the prompts that are new to them. Raises ConfigError where the
    log is of other batches.
    """
    rungs = plan_rungs(list(map(len, data.prompts)), data.batch_size, seed)
    planned = [batch for batches in rungs for batch in batches]
    found = [batch.prompts for batch in log.batches]
    if found != planned[: len(found)]:
        raise ConfigError(f"{log.path} holds other batches than this search would decode: remove the folder")
    entered, done = list(range(len(schedules))), 0
    with _progress() as progress:
        bar = progress.add_task("", total=_work(rungs, len(schedules)))
        for number, batches in enumerate(rungs, 1):
            if number > 1:
                entered = better_half(log.batches[:done], data.metric)
            progress.update(bar, description=f"rung {number} of {len(rungs)}: {len(entered)} schedules")
            here = [(FULL_DEPTH, SkipSchedule.full_depth(schedules[0].num_layers, schedules[0].horizon))]
            here += [(trial, schedules[trial]) for trial in entered]
            past = max(0, min(len(log.batches) - done, len(batches)))
            progress.advance(bar, past * len(here))
            if batches[past:]:
                for batch, turns in zip(batches[past:], data.take_turns(batches[past:], here), strict=True):
                    log.append(Batch(batch, turns))
                    progress.advance(bar, len(here))
            done += len(batches)
    return log.batches


def _work(rungs: Sequence[Sequence[list[int]]], schedules: int) -> int:
    """Batches to decode, counted once for each schedule and for full depth."""
    total, others = 0, schedules - 1
    for batches in rungs:
        total += len(batches) * (others + 2)
        others = min(others, max(KEPT, -(-others // 2)))
    return total


def _progress() -> Progress:
    columns = (*bar_columns(), MofNCompleteColumn(), TextColumn("schedules x batches"))
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=make_console(stderr=True))
