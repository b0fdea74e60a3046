"""Outputs of other systems as published by challenges: one for each example of a test split."""

import csv
from pathlib import Path

from data import Task
from data.files import MAX_FIELD_CHARACTERS
from eval.score.predictions import Prediction, read_predictions
from skipdecode.errors import ConfigError

SUFFIXES = {".txt": "one output per line", ".tsv": "a header, then a meaning representation and an output per line"}


def read_outputs(path: Path, task: Task) -> dict[str, Prediction]:
    """The outputs of a .txt or .tsv file, in the order of the task's test split, as predictions by id.

    Raises ConfigError where the number of outputs or a meaning representation differs from the examples.
    """
    examples = task.load("test")
    rows = _rows(path)
    if len(rows) != len(examples):
        raise ConfigError(
            f"{path} has {len(rows)} outputs, but the test split of {task.name} has {len(examples)} examples"
        )
    found = {}
    for number, (example, (meaning, text)) in enumerate(zip(examples, rows, strict=True), start=1):
        where = f"{path}, output {number}"
        if meaning and sorted(meaning.split(", ")) != sorted(example.meaning.split(", ")):
            raise ConfigError(
                f"{where} is for {meaning!r}, but example {number} of the test split is {example.meaning!r}"
            )
        found[example.id] = Prediction(
            where, example.id, example.prompt, text, example.references, example.meaning, example.part
        )
    return found


def _rows(path: Path) -> list[tuple[str, str]]:
    """Meaning representations (empty in a .txt file) and outputs."""
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
        raise ConfigError(f"{path} is not a table with {SUFFIXES['.tsv']}: {error}") from error
    for number, row in enumerate(rows, start=2):
        if len(row) != 2:
            raise ConfigError(f"{path}, line {number}: expected {SUFFIXES['.tsv']}, got {len(row)} fields")
    return [(row[0], row[1].strip()) for row in rows]


def read_any(path: Path, task: Task | None) -> dict[str, Prediction]:
    """Read predictions as JSON lines, or outputs of a challenge. Raises ConfigError where they can't be read."""
    if path.suffix not in SUFFIXES:
        return read_predictions(path)
    if task is None:
        kinds = ", ".join(f"{suffix}: {what}" for suffix, what in SUFFIXES.items())
        raise ConfigError(f"{path} holds outputs only ({kinds}): give the task of the test split with --task NAME")
    return read_outputs(path, task)
