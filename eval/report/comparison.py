"""The figures of a page, typed: the content of its JSON file."""

import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import track

from eval.console import make_console
from eval.report.positions import ORDERS, Bin, bin_width, by_position
from eval.report.runs import Run
from eval.results import Report, Row, speed_shown
from eval.score.predictions import Prediction
from eval.score.scores import NOT_COMPUTABLE
from eval.score.tokenizers import Words, unspaced_obstacle, words_by
from eval.score.words import words
from eval.speed.report import SpeedReport
from skipdecode.schedule.schedule import Over


@dataclass(frozen=True)
class Positions:
    """Shares of n-grams by position, for one point."""

    label: str
    n: int
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Line:
    """The rows of one checkpoint in a run, by their measured speed: a line in the pictures.

    Attributes:
        name: the run's, with the checkpoint's where that is the run's reference.
        over: what its targets are of.
        full_depth: the row that the speeds and the p values are relative to.
    """

    name: str
    run: str
    checkpoint: str
    over: Over
    full_depth: Row
    points: tuple[Row, ...]
    positions: tuple[Positions, ...]
    no_positions: str = ""  # why there are none, where that isn't for want of texts


NEAR = 1.25


@dataclass(frozen=True)
class Nearest:
    """The points nearest to a speed, one of each line.

    Attributes:
        speed: how many times full depth.
        labels: of the nearest point of each line, by measured speed; None where none is within a factor of NEAR.
    """

    speed: float
    labels: tuple[str | None, ...]


@dataclass(frozen=True)
class Text:
    """A prediction of a sample: by which line and point, and the full-depth text of the same run."""

    line: str
    label: str
    text: str
    full_depth: str


@dataclass(frozen=True)
class Sample:
    """A prompt of the test set with its references and all predictions."""

    id: str
    prompt: str
    references: tuple[str, ...]
    texts: tuple[Text, ...]


@dataclass(frozen=True)
class Conditions:
    """The conditions of a run: the fields of its report but the rows, and what it says of them."""

    name: str
    report: dict[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """All that a page shows.

    Attributes:
        over: the speed that pictures and comparisons show: of the whole where all targets are, else of decoding.
        metrics: that every run has, in the order of the first.
        shared_prompts: how many prompts all runs decoded.
        speeds: speed benchmarks shown beside the runs, by their files' names.
    """

    task: str
    over: Over
    metrics: tuple[str, ...]
    shared_prompts: int
    lines: tuple[Line, ...]
    rivals: tuple[Nearest, ...]
    samples: tuple[Sample, ...]
    conditions: tuple[Conditions, ...]
    speeds: dict[str, SpeedReport]

    def to_json(self) -> str:
        """The fields, as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"


def compare(runs: Sequence[Run], speeds: Mapping[str, SpeedReport], *, samples: int) -> Comparison:
    """Everything that a page shows of runs of one task."""
    width = bin_width(
        [
            len(words_by(run.report.tokenizer, str.split)(line.prediction))
            for run in runs
            for lines in run.predictions
            for line in lines
        ]
    )
    over = speed_shown(run.report for run in runs)
    lines: list[Line] = []
    for run in runs:
        lines += _lines(run, over, width)
    shared = _shared_ids(runs)
    return Comparison(
        task=runs[0].report.task,
        over=over,
        metrics=tuple(m for m in runs[0].report.rows[0].scores if all(m in run.report.rows[0].scores for run in runs)),
        shared_prompts=len(shared),
        lines=tuple(lines),
        rivals=tuple(_rivals(lines, over)),
        samples=tuple(_samples(runs, spread(shared, samples))),
        conditions=tuple(Conditions(run.name, _conditions(run.report), tuple(run.report.notes())) for run in runs),
        speeds=dict(speeds),
    )


def spread(items: Sequence[str], count: int) -> list[str]:
    """`count` items evenly spread over all, the first and the last among them; all where there are no more.

    >>> spread("abcdefghi", 3)
    ['a', 'e', 'i']
    """
    if len(items) <= count:
        return list(items)
    return [items[round(n * (len(items) - 1) / max(1, count - 1))] for n in range(count)]


def line_name(run: Run, row: Row) -> str:
    """The name of a row's line in pictures and tables."""
    return run.name if row.checkpoint == run.report.checkpoint else f"{run.name}: {Path(row.checkpoint).name}"


def _lines(run: Run, over: Over, width: int) -> list[Line]:
    points = run.report.rows
    references: dict[tuple[str, ...], list[list[str]]] = {}  # tokenised once for all rows
    lines = []
    for checkpoint in dict.fromkeys(point.checkpoint for point in points):
        pairs = zip(points, run.predictions, strict=True)
        own = [(point, predictions) for point, predictions in pairs if point.checkpoint == checkpoint]
        name = line_name(run, own[0][0])
        positions: list[Positions] = []
        references_of_all = [text for line in own[0][1] for text in line.references]
        obstacle = unspaced_obstacle(references_of_all, run.report.tokenizer, "13a")
        title = escape(f"{name}: positions")
        for point, predictions in track(own, title, console=make_console(stderr=True), transient=True):
            if obstacle is None:
                positions += _positions(
                    point.label, predictions, references, width, words_by(run.report.tokenizer, words)
                )
        lines.append(
            Line(
                name=name,
                run=run.name,
                checkpoint=checkpoint,
                over=run.report.over,
                full_depth=points[0],
                points=tuple(sorted((p for p, _ in own), key=lambda point: (point.speed(over).median, point.label))),
                positions=tuple(positions),
                no_positions=f"{NOT_COMPUTABLE}, because {obstacle}." if obstacle is not None else "",
            )
        )
    return lines


def _positions(
    label: str,
    predictions: Sequence[Prediction],
    tokenised: dict[tuple[str, ...], list[list[str]]],
    width: int,
    split: Words,
) -> list[Positions]:
    def words_of(text: str) -> list[str]:
        return split(unicodedata.normalize("NFC", text))

    texts = [words_of(line.prediction) for line in predictions]
    references = []
    for line in predictions:
        if line.references not in tokenised:
            tokenised[line.references] = [words_of(text) for text in line.references]
        references.append(tokenised[line.references])
    return [Positions(label, n, tuple(by_position(texts, references, n, width))) for n in ORDERS]


def _rivals(lines: Sequence[Line], over: Over) -> list[Nearest]:
    """For each whole target that a row was made for, the nearest rows by measured speed, also of shallow models."""
    speedups = {point.speedup_target or 1.0 for line in lines for point in line.points}
    rivals = []
    for speed in sorted(speedup for speedup in speedups if speedup > 1 and speedup == int(speedup)):
        labels: list[str | None] = []
        for line in lines:
            apart = {point.label: abs(math.log(point.speed(over).median / speed)) for point in line.points}
            near = min(apart, key=apart.__getitem__, default=None)
            labels.append(near if near is not None and apart[near] <= math.log(NEAR) else None)
        if any(label is not None for label in labels):
            rivals.append(Nearest(speed, tuple(labels)))
    return rivals


def _shared_ids(runs: Sequence[Run]) -> list[str]:
    """The prompts that all runs decoded, in the first run's order.

    Ids are numbers that other data has too: it is the references that say whether two runs have a prompt in common.
    """
    known = [{line.id: line.references for line in run.predictions[0]} for run in runs]
    return [name for name, texts in known[0].items() if all(other.get(name) == texts for other in known)]


def _samples(runs: Sequence[Run], ids: Sequence[str]) -> list[Sample]:
    chosen: dict[str, list[Text]] = {name: [] for name in ids}
    prompts: dict[str, Prediction] = {}
    for run in runs:
        full = {line.id: line.prediction for line in run.predictions[0]}
        for row, lines in zip(run.report.rows, run.predictions, strict=True):
            for line in lines:
                if line.id in chosen:
                    prompts.setdefault(line.id, line)
                    chosen[line.id].append(Text(line_name(run, row), row.label, line.prediction, full[line.id]))
    return [Sample(name, prompts[name].prompt, prompts[name].references, tuple(chosen[name])) for name in ids]


def _conditions(report: Report) -> dict[str, Any]:
    values = asdict(report)
    del values["rows"]
    return values
