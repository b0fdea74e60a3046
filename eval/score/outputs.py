"""Outputs of systems that others built, as challenges publish them: a text for each example of a test split."""

import csv
from pathlib import Path

from data import Task
from data.files import MAX_FIELD_CHARACTERS
from eval.score.predictions import Prediction, read_predictions
from skipdecode.errors import ConfigError

SUFFIXES = {".txt": "a text a line", ".tsv": "a header, then a meaning representation and a text a line"}


def read_outputs(path: Path, task: Task) -> dict[str, Prediction]:
    """The texts of a .txt or .tsv file, in the order of the task's test split, as predictions by their ids.

    Raises ConfigError where there aren't as many as examples, or a meaning representation is that of another one.
    """
    examples = task.load("test")
    rows = _rows(path)
    if len(rows) != len(examples):
        raise ConfigError(f"{path} has {len(rows)} texts, the test split of {task.name} {len(examples)} examples")
    found = {}
    for number, (example, (meaning, text)) in enumerate(zip(examples, rows, strict=True), start=1):
        where = f"{path}, text {number}"
        if meaning and sorted(meaning.split(", ")) != sorted(example.meaning.split(", ")):
            raise ConfigError(f"{where} is of {meaning!r}, example {number} of the test split of {example.meaning!r}")
        found[example.id] = Prediction(
            where, example.id, example.prompt, text, example.references, example.meaning, example.part
        )
    return found


def _rows(path: Path) -> list[tuple[str, str]]:
    """Meaning representations, empty in a text file, and texts."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    lines = text.removesuffix("\n").split("\n")
    if path.suffix == ".txt":
        return [("", line.strip()) for line in lines]
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    try:
        rows = [row for row in csv.reader(lines[1:], delimiter="\t") if row]
    except csv.Error as error:
        raise ConfigError(f"{path} is no table of {SUFFIXES['.tsv']}: {error}") from error
    for number, row in enumerate(rows, start=2):
        if len(row) != 2:
            raise ConfigError(f"{path}, line {number}: expected {SUFFIXES['.tsv']}, got {len(row)} fields")
    return [(row[0], row[1].strip()) for row in rows]


def read_any(path: Path, task: Task | None) -> dict[str, Prediction]:
    """Predictions as JSON lines, or a challenge's outputs. Raises ConfigError where they can't be read."""
    if path.suffix not in SUFFIXES:
        return read_predictions(path)
    if task is None:
        kinds = ", ".join(f"{suffix}: {what}" for suffix, what in SUFFIXES.items())
        raise ConfigError(f"{path} holds texts alone ({kinds}): name the test split that they are of, --task NAME")
    return read_outputs(path, task)
