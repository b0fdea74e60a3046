"""Finished evaluations, read from their folders."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.report.rows import full_depth_of, label_of
from eval.results import FILE_NAME, Report, Row
from skipdecode import ConfigError


@dataclass(frozen=True)
class Prediction:
    """A line of a predictions file."""

    id: str
    prompt: str
    prediction: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """An evaluation's folder.

    Attributes:
        name: what it is called on the page.
        predictions: of each row of the report, in the order of the test set.
    """

    name: str
    folder: Path
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
    return Run(name or _default_name(folder, report), folder, report, predictions)


def _default_name(folder: Path, report: Report) -> str:
    """The folder's name; the checkpoint's where the folder is the `eval` inside it."""
    own = folder.resolve().name
    return Path(report.checkpoint).name if own == "eval" else own


def _check(report: Report, path: Path) -> None:
    """Refuse what the dataclasses don't: values that are no numbers, no rows, no 1x row."""
    try:
        json.dumps(asdict(report), ensure_ascii=False).encode()
        for row in report.rows:
            figures = [row.speedup_target or 1.0, row.mean_layers, row.wall_clock_speedup, *row.wall_clock_quartiles]
            figures += [row.prefill_seconds, row.decode_seconds, row.tokens_per_second, row.cache_bytes]
            figures += [*row.scores.values(), *row.p_values.values(), *(v for i in row.intervals.values() for v in i)]
            if not all(math.isfinite(figure) for figure in figures) or len(row.wall_clock_quartiles) != 2:
                raise ValueError(f"the row {label_of(row)} holds what is no number")
            if row.wall_clock_speedup <= 0:
                raise ValueError(f"the row {label_of(row)} has a speed of {row.wall_clock_speedup}")
        report.notes()
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{path} is no report of an evaluation: {error}") from error
    try:
        full_depth_of(report)
    except StopIteration as error:
        raise ConfigError(f"{path} has no row at 1x: there is nothing to compare the others with") from error
    metrics = [set(row.scores) for row in report.rows]
    if not metrics[0] or any(scores != metrics[0] for scores in metrics):
        raise ConfigError(f"{path}: its rows are not all scored by the same metrics")


def _check_prompts(folder: Path, predictions: Sequence[tuple[Prediction, ...]]) -> None:
    """Refuse files of different prompts."""
    prompts = [[(line.id, line.prompt, line.references) for line in lines] for lines in predictions]
    if any(others != prompts[0] for others in prompts):
        raise ConfigError(f"{folder / 'predictions'}: its files are not all of the same prompts and references")


def _predictions(folder: Path, report: Report, row: Row) -> tuple[Prediction, ...]:
    path = folder / "predictions" / f"{label_of(row)}.jsonl"
    try:
        lines = [_line(json.loads(line)) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except OSError as error:
        raise ConfigError(f"{path} can't be read, though the report has a row for it: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} doesn't hold predictions, a JSON object a line: {error!r}") from error
    if len(lines) != report.examples:
        raise ConfigError(
            f"{path} holds {len(lines)} predictions, the report beside it is of {report.examples} prompts: "
            "they are not of the same evaluation"
        )
    return tuple(lines)


def _line(values: Mapping[str, Any]) -> Prediction:
    references = values["references"]
    texts = [values["id"], values["prompt"], values["prediction"], *references]
    if isinstance(references, str) or not references or not all(isinstance(text, str) for text in texts):
        raise ValueError("id, prompt and prediction must be texts, references a list of texts")
    "".join(texts).encode()  # a lone surrogate is no text: it could not be written
    return Prediction(texts[0], texts[1], texts[2], tuple(references))
