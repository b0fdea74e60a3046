"""Tasks of one text in and one text out, their rows read one by one from local files or from the Hub."""

import glob
import json
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from data.task import Example, Split, Task, check_split
from skipdecode.errors import ConfigError, first_line

# How a file's name starts for each split, and the builder of `datasets` that reads what it ends in.
PREFIXES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
BUILDERS = {".csv": "csv", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# Else pandas takes a text such as "NA" or "null" for a missing one.
BUILDER_OPTIONS: dict[str, dict[str, Any]] = {"csv": {"keep_default_na": False}}
_UNNAMED = "__index_level_0__"  # where pandas puts the first field of rows with more fields than the header


@dataclass(frozen=True)
class Row:
    """One row of a source, and where it stands, for messages."""

    where: str
    values: dict[str, Any]

    def text(self, column: str) -> str:
        """The text of a column. Raises ConfigError where there is none."""
        if column not in self.values:
            raise ConfigError(f"{self.where}: no column {column!r}, only {', '.join(map(str, self.values))}")
        value = self.values[column]
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.where}: {column} is {value!r}: it must be text")
        if value is None or not value.strip():
            raise ConfigError(f"{self.where}: {column} must not be empty")
        return value


class TextToText(Task):
    """A task whose rows are an input and an output, from a folder of files or from the Hub where none is given.

    Args:
        path: a folder with a file for each split, its name starting with train, validation (valid, val, dev) or test
            and ending in .csv, .jsonl, .json or .parquet.
        holdout: rows for each of the validation and the test split that has no file. They come off the end of the
            training file, the test split's last, and aren't trained on. The Hub has every split: none is held out.
    """

    metrics: ClassVar[tuple[str, ...]] = ("bleu", "rouge1", "rouge2", "rougeL", "bertscore")
    columns: ClassVar[tuple[str, ...]]  # what a row of the source must have
    repository: ClassVar[str]
    configuration: ClassVar[str | None] = None

    def __init__(self, path: str | None = None, holdout: int = 0) -> None:
        if type(holdout) is not int or holdout < 0:
            raise ConfigError(f"holdout is {holdout!r}: it must be an integer of 0 or more")
        self.path = Path(path) if path is not None else None
        self.holdout = holdout

    def stream(self, split: Split) -> Iterator[Example]:
        """The examples of a split; beside the one in hand no more rows are held than are held out."""
        check_split(split)
        rows = self._hub_rows(split) if self.path is None else self._local_rows(split)
        for number, row in enumerate(rows):
            yield self.example(f"{self.name}-{split}-{number}", row)

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The columns that are read as they are written, where a CSV might take 007 for a number."""
        return self.columns

    @abstractmethod
    def example(self, name: str, row: Row) -> Example:
        """A row as an example of that name. Raises ConfigError for a row that isn't one."""

    def files(self, split: Split) -> tuple[Path, ...]:
        """The file of the split; with a holdout every split's, since a file that appears changes what is held out."""
        if self.path is None:
            return ()
        found = self._found()
        if split not in found and (not self.holdout or "train" not in found):
            names = " or ".join(PREFIXES[split])
            advice = f"add a file whose name starts with {names} and ends in {', '.join(BUILDERS)}"
            if split != "train":
                advice += ", or take rows off a training file with the option holdout (data.options.holdout=100)"
            raise ConfigError(f"split {split!r} of {self.name} has no file in {self.path}: {advice}")
        return tuple(found.values()) if self.holdout else (found[split],)

    def _found(self) -> dict[Split, Path]:
        """The file of each split that has one."""
        assert self.path is not None
        check_folder(self.path)
        files = sorted(file for file in self.path.iterdir() if file.suffix in BUILDERS and file.is_file())
        found: dict[Split, Path] = {}
        for split, prefixes in PREFIXES.items():
            matches = [file for file in files if file.name.startswith(prefixes)]
            if len(matches) > 1:
                raise ConfigError(
                    f"split {split!r} of {self.name} has two files in {self.path}, {matches[0].name} and "
                    f"{matches[1].name}: keep one"
                )
            if matches:
                found[split] = matches[0]
        return found

    def _local_rows(self, split: Split) -> Iterator[Row]:
        self.files(split)  # which refuses a split that can't be read
        found = self._found()
        if split != "train" and split in found:
            yield from file_rows(found[split], self.text_columns)
            return
        without_file: list[Split] = [name for name in ("validation", "test") if name not in found]
        held_out = self.holdout * len(without_file)
        last: deque[Row] = deque()  # the rows that may yet turn out to be the file's last ones
        enough = False
        for row in file_rows(found["train"], self.text_columns):
            last.append(row)
            if len(last) > held_out:
                enough = True
                first = last.popleft()
                if split == "train":
                    yield first
        if not enough:
            raise ConfigError(
                f"holdout is {self.holdout}: {found['train']} has {len(last)} rows, too few to hold "
                f"{held_out} out and train on the rest"
            )
        if split != "train":
            start = without_file.index(split) * self.holdout
            yield from list(last)[start : start + self.holdout]

    def _hub_rows(self, split: Split) -> Iterator[Row]:
        options: dict[str, Any] = {"name": self.configuration} if self.configuration else {}
        return hub_rows(self.repository, split, streaming=True, **options)


def check_folder(path: Path) -> None:
    """Raises ConfigError where a task's folder isn't there."""
    if not path.is_dir():
        raise ConfigError(f"data.path is {str(path)!r}: no such folder")


def file_rows(file: Path, text_columns: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of a CSV, JSON or Parquet file, read as they are asked for.

    Args:
        text_columns: columns that a CSV's reader takes as they are written, whatever they look like.

    Raises ConfigError that names the file.
    """
    builder = BUILDERS[file.suffix]
    number = 0
    try:
        rows = _json_rows(file) if builder == "json" else _table_rows(file, builder, text_columns)
        for number, values in enumerate(rows, start=1):
            if _UNNAMED in values:
                raise ValueError("more fields than the first line names; quote texts with commas")
            yield Row(f"{file}, row {number}", values)
    except Exception as error:  # the readers of pandas, pyarrow and datasets each have their own types
        raise ConfigError(f"{file}: not {builder.upper()}, near row {number} ({first_line(error)})") from error
    if number == 0:
        raise ConfigError(f"{file} has no rows")


def _json_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a list or of JSON lines. Arrow, which `datasets` reads JSON with, makes dates of some texts."""
    with file.open(encoding="utf-8-sig") as stream:
        is_list = stream.read(64).lstrip().startswith("[")
        stream.seek(0)
        for values in json.load(stream) if is_list else map(json.loads, filter(str.strip, stream)):
            if not isinstance(values, dict):
                raise ValueError(f"expected an object, got {type(values).__name__}")
            json.dumps(values, ensure_ascii=False).encode()  # which refuses half of a character
            yield values


def _table_rows(file: Path, builder: str, text_columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    import datasets  # here, since it takes seconds and a task that isn't read doesn't need it

    datasets.logging.set_verbosity(logging.CRITICAL)  # what is wrong with a file is said by the caller
    options = dict(BUILDER_OPTIONS.get(builder, {}))
    if builder == "csv":
        options["converters"] = dict.fromkeys(text_columns, str)
    options |= {"data_files": glob.escape(str(file)), "split": "train", "streaming": True}
    yield from datasets.load_dataset(builder, **options)


def hub_rows(repository: str, split: Split, **options: Any) -> Iterator[Row]:
    """A split of a repository, read with options of `load_dataset`. Raises ConfigError where the Hub can't be read."""
    import datasets  # here, since it takes seconds and a local folder doesn't need it

    try:
        for number, values in enumerate(datasets.load_dataset(repository, split=split, **options), start=1):
            yield Row(f"{repository}, {split}, row {number}", values)
    except Exception as error:  # no network shows as any of a dozen types
        raise ConfigError(
            f"{repository} can't be read from the Hub ({type(error).__name__}): "
            "name a local folder with data.path=FOLDER (--data-dir FOLDER in the evaluation)"
        ) from error
