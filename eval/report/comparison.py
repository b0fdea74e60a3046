"""What a page shows, as typed figures: the content of its JSON file."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from eval.report.bounds import bounds_of
from eval.report.positions import ORDERS, Bin, Words, bin_width, by_position, words_of
from eval.report.rows import (
    SKIP,
    checkpoint_of,
    full_depth_of,
    label_of,
    layers_per_step_of,
    num_layers_of,
    system_of,
)
from eval.report.runs import Prediction, Run
from eval.report.timings import Timing, timings_of
from eval.results import Report, Row
from eval.speed_report import SpeedReport


@dataclass(frozen=True)
class Point:
    """A row of a run.

    Attributes:
        label: what the row is called: its target, where it has no other name.
        layers_per_step: where the evaluation counted them.
        bound_by_bytes: how much skipping it could be by the bytes that a step reads; None where that isn't known.
        timings: at other batch sizes, where the evaluation measured them.
        The others are as in `eval.results.Row`.
    """

    label: str
    speedup_target: float | None
    schedule: dict[str, Any] | None
    num_layers: int
    mean_layers: float
    layers_per_step: float | None
    wall_clock_speedup: float
    wall_clock_quartiles: tuple[float, float]
    bound_by_bytes: float | None
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    cache_bytes: int
    scores: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    p_values: dict[str, float]
    timings: tuple[Timing, ...]


@dataclass(frozen=True)
class Positions:
    """Shares of n-grams by position, for one point."""

    label: str
    n: int
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Line:
    """The rows of one decoder in a run, by their measured speed: a line in the pictures.

    Attributes:
        name: the run's, with the decoder's where the run has several.
        checkpoint, system: what it decodes with, and how.
        full_depth: the row that the speeds and the p values are relative to.
    """

    name: str
    run: str
    checkpoint: str
    system: str
    full_depth: Point
    points: tuple[Point, ...]
    positions: tuple[Positions, ...]


NEAR = 1.25


@dataclass(frozen=True)
class Rival:
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
    """How a run was measured: the fields of its report but the rows, what it says of them, and a note on the bounds."""

    name: str
    report: dict[str, Any]
    notes: tuple[str, ...]
    bound_note: str


@dataclass(frozen=True)
class Comparison:
    """All that a page shows.

    Attributes:
        metrics: that every run has, in the order of the first.
        shared_prompts: how many prompts all runs decoded.
        speeds: speed benchmarks shown beside the runs, by their files' names.
    """

    task: str
    metrics: tuple[str, ...]
    shared_prompts: int
    lines: tuple[Line, ...]
    rivals: tuple[Rival, ...]
    samples: tuple[Sample, ...]
    conditions: tuple[Conditions, ...]
    speeds: dict[str, SpeedReport]

    def to_json(self) -> str:
        """The fields, as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"


def compare(runs: Sequence[Run], speeds: Mapping[str, SpeedReport], *, samples: int) -> Comparison:
    """Everything that a page shows of runs of one task."""
    bounds = [bounds_of(run) for run in runs]
    width = bin_width([len(p.prediction.split()) for run in runs for lines in run.predictions for p in lines])
    lines: list[Line] = []
    for run, bound in zip(runs, bounds, strict=True):
        lines += _lines(run, bound.by_row, width)
    shared = _shared_ids(runs)
    return Comparison(
        task=runs[0].report.task,
        metrics=tuple(m for m in runs[0].report.rows[0].scores if all(m in run.report.rows[0].scores for run in runs)),
        shared_prompts=len(shared),
        lines=tuple(lines),
        rivals=tuple(_rivals(lines)),
        samples=tuple(_samples(runs, spread(shared, samples))),
        conditions=tuple(
            Conditions(run.name, _conditions(run.report), tuple(run.report.notes()), bound.note)
            for run, bound in zip(runs, bounds, strict=True)
        ),
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
    """What the decoder of a row is called in pictures and tables: by its run, and by what sets it apart in that."""
    report = run.report
    checkpoint, system = checkpoint_of(row, report), system_of(row)
    if checkpoint != report.checkpoint:
        return f"{run.name}: {Path(checkpoint).name}"
    return run.name if system == SKIP else f"{run.name}: {system}"


def _lines(run: Run, bounds: Sequence[float | None], width: int) -> list[Line]:
    rows = list(zip(run.report.rows, bounds, run.predictions, strict=True))
    full = next(_point(row, bound) for row, bound, _ in rows if row is full_depth_of(run.report))
    references: dict[tuple[str, ...], list[Words]] = {}  # tokenised once for all rows
    lines = []
    for name in dict.fromkeys(line_name(run, row) for row in run.report.rows):
        own = [entry for entry in rows if line_name(run, entry[0]) == name]
        points = [_point(row, bound) for row, bound, _ in own]
        positions: list[Positions] = []
        for row, _, predictions in track(own, f"{name}: positions", console=Console(stderr=True), transient=True):
            positions += _positions(label_of(row), predictions, references, width)
        lines.append(
            Line(
                name=name,
                run=run.name,
                checkpoint=checkpoint_of(own[0][0], run.report),
                system=system_of(own[0][0]),
                full_depth=full,
                points=tuple(sorted(points, key=lambda point: (point.wall_clock_speedup, point.label))),
                positions=tuple(positions),
            )
        )
    return lines


def _point(row: Row, bound: float | None) -> Point:
    return Point(
        label=label_of(row),
        speedup_target=row.speedup_target,
        schedule=row.schedule,
        num_layers=num_layers_of(row),
        mean_layers=row.mean_layers,
        layers_per_step=layers_per_step_of(row),
        wall_clock_speedup=row.wall_clock_speedup,
        wall_clock_quartiles=row.wall_clock_quartiles,
        bound_by_bytes=bound,
        prefill_seconds=row.prefill_seconds,
        decode_seconds=row.decode_seconds,
        tokens_per_second=row.tokens_per_second,
        cache_bytes=row.cache_bytes,
        scores=row.scores,
        intervals=row.intervals,
        p_values=row.p_values,
        timings=timings_of(row),
    )


def _positions(
    label: str, predictions: Sequence[Prediction], tokenised: dict[tuple[str, ...], list[Words]], width: int
) -> list[Positions]:
    words = [words_of(line.prediction) for line in predictions]
    references = []
    for line in predictions:
        if line.references not in tokenised:
            tokenised[line.references] = [words_of(text) for text in line.references]
        references.append(tokenised[line.references])
    return [Positions(label, n, tuple(by_position(words, references, n, width))) for n in ORDERS]


def _rivals(lines: Sequence[Line]) -> list[Rival]:
    """For each whole target that a row was made for, the nearest rows by measured speed among those that skip."""
    targets = {point.speedup_target or 1.0 for line in lines for point in line.points}
    rivals = []
    for speed in sorted(target for target in targets if target > 1 and target == int(target)):
        labels: list[str | None] = []
        for line in lines:
            skipping = [point for point in line.points if point.mean_layers < point.num_layers]
            apart = {point.label: abs(math.log(point.wall_clock_speedup / speed)) for point in skipping}
            near = min(apart, key=apart.__getitem__, default=None)
            labels.append(near if near is not None and apart[near] <= math.log(NEAR) else None)
        if any(label is not None for label in labels):
            rivals.append(Rival(speed, tuple(labels)))
    return rivals


def _shared_ids(runs: Sequence[Run]) -> list[str]:
    """The prompts that all runs decoded, in the first run's order."""
    ids = [[line.id for line in run.predictions[0]] for run in runs]
    others = [set(several) for several in ids[1:]]
    return [name for name in dict.fromkeys(ids[0]) if all(name in several for several in others)]


def _samples(runs: Sequence[Run], ids: Sequence[str]) -> list[Sample]:
    chosen: dict[str, list[Text]] = {name: [] for name in ids}
    prompts: dict[str, Prediction] = {}
    for run in runs:
        rows = list(zip(run.report.rows, run.predictions, strict=True))
        full = next({p.id: p.prediction for p in lines} for row, lines in rows if row is full_depth_of(run.report))
        for row, lines in rows:
            for line in lines:
                if line.id in chosen:
                    prompts.setdefault(line.id, line)
                    chosen[line.id].append(Text(line_name(run, row), label_of(row), line.prediction, full[line.id]))
    return [Sample(name, prompts[name].prompt, prompts[name].references, tuple(chosen[name])) for name in ids]


def _conditions(report: Report) -> dict[str, Any]:
    values = asdict(report)
    del values["rows"]
    return values
