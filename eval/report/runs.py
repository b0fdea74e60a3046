"""Finished evaluations, read from their folders."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.results import FILE_NAME, Report, Row
from eval.score.predictions import Prediction, read_predictions
from skipdecode import ConfigError


@dataclass(frozen=True)
class Run:
    """The folder of an evaluation.

    Attributes:
        name: its name on the page.
        predictions: for each row of the report, its predictions in the order of the test set.
    """

    name: str
    report: Report
    predictions: tuple[tuple[Prediction, ...], ...]


def read_runs(arguments: Sequence[str]) -> list[Run]:
    """Read runs given as `NAME=FOLDER` or `FOLDER`. Raises ConfigError where they can't be compared."""
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
                "their scores can't be compared; make a page for each"
            )
        if run.report.tokenizer != first.report.tokenizer:
            own, other = (each.report.tokenizer or "each metric's own" for each in (run, first))
            raise ConfigError(
                f"the scores of {run.name!r} use the tokenizer {own}, those of {first.name!r} use {other}: they "
                "can't be compared; make a page for each"
            )
    return runs


def read_run(argument: str) -> Run:
    """Read a run. Raises ConfigError where its folder is incomplete or inconsistent."""
    name, equals, path = argument.partition("=")
    if not equals or Path(argument).is_dir():  # the name of a folder may contain =
        name, path = "", argument
    folder = Path(path)
    if equals and not name and not Path(argument).is_dir():
        raise ConfigError(f"run {argument!r}: the name before the = is empty")
    if not (folder / FILE_NAME).is_file():
        what = f"it has no {FILE_NAME}" if folder.is_dir() else "there is no such folder"
        raise ConfigError(f"{path!r} is not an evaluation: {what}; give the --output folder of `python -m eval`")
    report = Report.load(folder / FILE_NAME)
    predictions = tuple(_predictions(folder, report, row) for row in report.rows)
    _check_prompts(folder, predictions)
    own = folder.resolve().name
    # A checkpoint evaluated from within its folder is called "." and has its evaluation in a subfolder.
    known = Path(report.checkpoint).name or folder.resolve().parent.name
    return Run(name or (known if own == "eval" else own), report, predictions)


def _check_prompts(folder: Path, predictions: Sequence[tuple[Prediction, ...]]) -> None:
    """Raise ConfigError where the files of predictions differ in their prompts or references."""
    prompts = [[(line.id, line.prompt, line.references) for line in lines] for lines in predictions]
    if any(others != prompts[0] for others in prompts):
        raise ConfigError(f"{folder / 'predictions'}: its files have different prompts or references")


def _predictions(folder: Path, report: Report, row: Row) -> tuple[Prediction, ...]:
    path = folder / "predictions" / f"{row.label}.jsonl"
    lines = tuple(read_predictions(path).values())
    if len(lines) != report.examples:
        raise ConfigError(
            f"{path} holds {len(lines)} predictions, but the report beside it has {report.examples} prompts: "
            "they are from different evaluations"
        )
    return lines
