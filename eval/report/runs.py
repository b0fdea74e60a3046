"""Finished evaluations, read from their folders."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.results import FILE_NAME, Report, Row
from eval.score.predictions import Prediction, read_predictions
from skipdecode import ConfigError


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
        if run.report.tokenizer != first.report.tokenizer:
            own, other = (each.report.tokenizer or "each metric's own" for each in (run, first))
            raise ConfigError(
                f"the tokenizer of {run.name!r}'s scores is {own}, of {first.name!r}'s {other}: their scores can't be "
                "compared, make a page for each"
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
    predictions = tuple(_predictions(folder, report, row) for row in report.rows)
    _check_prompts(folder, predictions)
    own = folder.resolve().name
    # A checkpoint that was evaluated where it lies is called "." and has its evaluation within.
    known = Path(report.checkpoint).name or folder.resolve().parent.name
    return Run(name or (known if own == "eval" else own), report, predictions)


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
