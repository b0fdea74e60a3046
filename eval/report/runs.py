"""Finished evaluations, read from their folders."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from eval.results import FILE_NAME, Report, Row
from eval.score.predictions import Prediction, read_predictions
from eval.score.registry import METRICS, PART
from skipdecode import ConfigError, SkipSchedule


@dataclass(frozen=True)
class Run:
    """An evaluation's folder.

    Attributes:
        name: what it is called on the page.
        predictions: of each row of the report, in the order of the test set.
    """

    name: str
    report: Report
    predictions: tuple[tuple[Prediction, ...], ...]


def read_runs(arguments: Sequence[str]) -> list[Run]:
    """The runs that `NAME=FOLDER` or `FOLDER` name. Raises ConfigError where they can't be shown side by side."""
    runs = [read_run(argument) for argument in arguments]
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two runs are called {name!r}: name them, as in 'first=FOLDER' 'second=FOLDER'")
    first = runs[0]
    for run in runs[1:]:
        if run.report.task != first.report.task:
            raise ConfigError(
                f"{run.name!r} is of the task {run.report.task}, {first.name!r} of {first.report.task}: "
                "their scores can't be compared, make a page for each"
            )
    return runs


def read_run(argument: str) -> Run:
    """One run. Raises ConfigError where its folder lacks something, or its parts don't belong together."""
    name, equals, path = argument.partition("=")
    if not equals or Path(argument).is_dir():  # a folder may have a sign in its name
        name, path = "", argument
    folder = Path(path)
    if equals and not name and not Path(argument).is_dir():
        raise ConfigError(f"run {argument!r}: the name before the = is empty")
    if not (folder / FILE_NAME).is_file():
        what = f"it has no {FILE_NAME}" if folder.is_dir() else "there is no such folder"
        raise ConfigError(f"{path!r} is no evaluation: {what}; name the --output of `python -m eval`")
    report = Report.load(folder / FILE_NAME)
    _check(report, folder / FILE_NAME)
    predictions = tuple(_predictions(folder, report, row) for row in report.rows)
    _check_prompts(folder, predictions)
    own = folder.resolve().name
    # A checkpoint that was evaluated where it lies is called "." and has its evaluation within.
    known = Path(report.checkpoint).name or folder.resolve().parent.name
    return Run(name or (known if own == "eval" else own), report, predictions)


def _check(report: Report, path: Path) -> None:
    """Refuse what the dataclasses don't: values that are no numbers, rows that can't be compared."""
    try:
        json.dumps(asdict(report), ensure_ascii=False, allow_nan=False).encode()
        for row in report.rows:
            if unknown := {name for name in row.scores if name.partition(PART)[0] not in METRICS}:
                raise ValueError(f"the row {row.label} has scores by {min(unknown)!r}, which is no metric")
            if not row.wall_clock_speedup > 0 or not row.layers_per_step > 0 or not (row.speedup_target or 1) > 0:
                raise ValueError(f"the row {row.label} has a speed, a target or layers that aren't above 0")
            # Drafted by as many layers as pay, a lossless row has neither.
            if row.system != "lossless" and (row.schedule is None) == (row.threshold is None):
                raise ValueError(f"the row {row.label} needs either a schedule or a threshold")
            if row.schedule is not None:
                SkipSchedule.from_dict(row.schedule)
        report.to_markdown()  # which formats the other figures
    except (ValueError, TypeError, AttributeError, LookupError, ConfigError) as error:
        raise ConfigError(f"{path} is no report of an evaluation: {error}") from error
    metrics = [set(row.scores) for row in report.rows]
    if not metrics[0] or any(scores != metrics[0] for scores in metrics):
        raise ConfigError(f"{path}: its rows are not all scored by the same metrics")


def _check_prompts(folder: Path, predictions: Sequence[tuple[Prediction, ...]]) -> None:
    """Refuse files of different prompts."""
    prompts = [[(line.id, line.prompt, line.references) for line in lines] for lines in predictions]
    if any(others != prompts[0] for others in prompts):
        raise ConfigError(f"{folder / 'predictions'}: its files are not all of the same prompts and references")


def _predictions(folder: Path, report: Report, row: Row) -> tuple[Prediction, ...]:
    path = folder / "predictions" / f"{row.label}.jsonl"
    lines = tuple(read_predictions(path).values())
    if len(lines) != report.examples:
        raise ConfigError(
            f"{path} holds {len(lines)} predictions, the report beside it is of {report.examples} prompts: "
            "they are not of the same evaluation"
        )
    return lines
