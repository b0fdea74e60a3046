"""The figures of a page as typed dataclasses, which are also the content of its JSON file."""

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
    """Percentages of n-grams found in a reference by position, for one row of a report."""

    label: str
    n: int
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Line:
    """The rows of one checkpoint in a run, ordered by measured speedup: a line in the pictures.

    Attributes:
        name: the name of the run; for the run's reference, followed by the name of that checkpoint.
        over: the speedup that its targets apply to.
        full_depth: the row that speedups and p values are relative to.
    """

    name: str
    run: str
    checkpoint: str
    over: Over
    full_depth: Row
    points: tuple[Row, ...]
    positions: tuple[Positions, ...]
    no_positions: str = ""  # why `positions` is empty, where the language of the references is the reason


NEAR = 1.25  # two speedups within this factor count as about the same


@dataclass(frozen=True)
class Nearest:
    """The rows nearest to a speedup, one of each line.

    Attributes:
        speed: the speedup over full depth.
        labels: the label of each line's nearest row by measured speedup; None where none is within a factor of NEAR.
    """

    speed: float
    labels: tuple[str | None, ...]


@dataclass(frozen=True)
class Text:
    """A prediction for a sample, with its line and row, and the full-depth prediction of the same run."""

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
    """The conditions of a run: the fields of its report except the rows, and its notes."""

    name: str
    report: dict[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """All figures of a page.

    Attributes:
        over: the speedup in pictures and comparisons: end-to-end where all targets are, else decode.
        metrics: those that every run has, in the order of the first run.
        shared_prompts: the number of prompts that all runs decoded.
        baselines: for each target, the rows of about the same measured speedup.
        speeds: reports of speed benchmarks by file name.
    """

    task: str
    over: Over
    metrics: tuple[str, ...]
    shared_prompts: int
    lines: tuple[Line, ...]
    baselines: tuple[Nearest, ...]
    samples: tuple[Sample, ...]
    conditions: tuple[Conditions, ...]
    speeds: dict[str, SpeedReport]

    def to_json(self) -> str:
        """The fields, as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"


def compare(runs: Sequence[Run], speeds: Mapping[str, SpeedReport], *, samples: int) -> Comparison:
    """Compare runs of one task."""
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
        baselines=tuple(_nearest_rows(lines, over)),
        samples=tuple(_samples(runs, spread(shared, samples))),
        conditions=tuple(Conditions(run.name, _conditions(run.report), tuple(run.report.notes())) for run in runs),
        speeds=dict(speeds),
    )


def spread(items: Sequence[str], count: int) -> list[str]:
    """`count` items spread evenly over all, including the first and the last; all items where there are fewer.

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
    tokenized: dict[tuple[str, ...], list[list[str]]] = {}  # references, shared by all rows
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
                    point.label, predictions, tokenized, width, words_by(run.report.tokenizer, words)
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
    tokenized: dict[tuple[str, ...], list[list[str]]],
    width: int,
    split: Words,
) -> list[Positions]:
    def words_of(text: str) -> list[str]:
        return split(unicodedata.normalize("NFC", text))

    texts = [words_of(line.prediction) for line in predictions]
    references = []
    for line in predictions:
        if line.references not in tokenized:
            tokenized[line.references] = [words_of(text) for text in line.references]
        references.append(tokenized[line.references])
    return [Positions(label, n, tuple(by_position(texts, references, n, width))) for n in ORDERS]


def _nearest_rows(lines: Sequence[Line], over: Over) -> list[Nearest]:
    """For each integer target above 1, the row of each line whose measured speedup is the nearest."""
    speedups = {point.speedup_target or 1.0 for line in lines for point in line.points}
    nearest = []
    for speed in sorted(speedup for speedup in speedups if speedup > 1 and speedup == int(speedup)):
        labels: list[str | None] = []
        for line in lines:
            distance = {point.label: abs(math.log(point.speed(over).median / speed)) for point in line.points}
            best = min(distance, key=distance.__getitem__, default=None)
            labels.append(best if best is not None and distance[best] <= math.log(NEAR) else None)
        if any(label is not None for label in labels):
            nearest.append(Nearest(speed, tuple(labels)))
    return nearest


def _shared_ids(runs: Sequence[Run]) -> list[str]:
    """The ids of the prompts that all runs decoded, in the order of the first run.

    Ids of different data may be equal, so the references must be equal too.
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
