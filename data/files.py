"""Rows of local files: CSV, TSV and JSON, also compressed by gzip, and Parquet; of one file or of all shards."""

import csv
import gzip
import json
import re
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from skipdecode.errors import ConfigError, first_line

_TEXT_FORMATS = {".csv": "CSV", ".tsv": "TSV", ".jsonl": "JSON", ".json": "JSON"}
# What a file's name may end in, whatever its case, and the format that this says.
FORMATS = {**_TEXT_FORMATS, **{f"{ending}.gz": name for ending, name in _TEXT_FORMATS.items()}, ".parquet": "Parquet"}
ENDINGS = f"{', '.join(_TEXT_FORMATS)} (also with .gz behind it) or .parquet"  # for messages
_SHARD = re.compile(r"-([0-9]+)-of-([0-9]+)(?:-[0-9a-f]{16})?$")  # as the Hub names them, formerly with a hash
_PARQUET_ROWS = 1000  # read at once: few enough for long articles
LONGEST_FIELD = 2**31 - 1  # characters; the csv module refuses more than 131,072 unless it is told


@dataclass(frozen=True)
class Row:
    """One row of a source, and where it stands, for messages."""

    where: str
    values: dict[str, Any]

    def text(self, column: str) -> str:
        """The text of a column, as it is written. Raises ConfigError where there is none but whitespace."""
        if column not in self.values:
            raise ConfigError(f"{self.where}: no column {column!r}, only {', '.join(map(str, self.values))}")
        value = self.values[column]
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.where}: {column} is {reprlib.repr(value)}: it must be text")
        if value is None or not value.strip():
            raise ConfigError(f"{self.where}: {column} must not be empty or blank")
        return value


def ending_of(file: Path) -> str | None:
    """The key of FORMATS that a file's name ends in; None where it has another ending."""
    return next((ending for ending in FORMATS if file.name.lower().endswith(ending)), None)


def in_order(files: Sequence[Path]) -> tuple[Path, ...]:
    """One file, or all shards of one data set in the order of their numbers.

    Shards are numbered from 0 or from 1, as in `train-00000-of-00002.parquet`.

    Raises ConfigError, which names the files, for several files that aren't shards of one data set, for a shard that is
    missing and for one that is there twice.
    """
    shards: dict[tuple[str, str, int], dict[int, Path]] = {}  # by what their names have in common, then by number
    for file in files:
        ending = ending_of(file) or ""
        stem = file.name[: len(file.name) - len(ending)]
        match = _SHARD.search(stem)
        if match is None:
            if len(files) > 1:
                raise _two_files(*files[:2])
            return (file,)
        numbered = shards.setdefault((stem[: match.start()], ending, int(match[2])), {})
        if int(match[1]) in numbered:
            raise _two_files(numbered[int(match[1])], file)
        numbered[int(match[1])] = file
    if len(shards) > 1:
        raise _two_files(*(next(iter(numbered.values())) for numbered in list(shards.values())[:2]))
    ((_, _, total), numbered) = next(iter(shards.items()))
    first = 1 if 0 not in numbered and total in numbered else 0
    for number, file in numbered.items():
        if not first <= number < first + total:
            raise ConfigError(f"{file}: {number} is no number of one of {total} shards, which start at 0 or 1")
    if len(numbered) < total:
        missing = next(number for number in count(first) if number not in numbered)
        raise ConfigError(
            f"{next(iter(numbered.values()))} is one of {total} shards, of which {total - len(numbered)} aren't there, "
            f"the first being number {missing:05d}: add what is missing"
        )
    return tuple(numbered[number] for number in sorted(numbered))


def _two_files(one: Path, other: Path) -> ConfigError:
    return ConfigError(
        f"two files in {one.parent}, {one.name} and {other.name}: keep one; shards of one data set are named as the "
        "Hub names them, train-00000-of-00002.parquet and train-00001-of-00002.parquet"
    )


def check_encoding(encoding: str) -> None:
    """Raises ConfigError for what Python knows no encoding of texts by."""
    try:
        "".encode(encoding)
    except (LookupError, ValueError) as error:
        raise ConfigError(
            f"encoding is {encoding!r}: it must be an encoding that Python knows, such as utf-8, utf-16 or cp1252"
        ) from error


def file_rows(file: Path, columns: Sequence[str] = (), encoding: str = "utf-8") -> Iterator[Row]:
    """The rows of a file, in the format that its name ends in, read as they are asked for.

    Args:
        columns: those that are needed, of which a table must have one each.
        encoding: of a text file; a byte order mark is left out.

    Raises ConfigError that names the file.
    """
    kind = FORMATS[ending_of(file) or ""]
    number = 0
    try:
        for number, values in enumerate(_values(file, kind, columns, encoding), start=1):
            yield Row(f"{file}, row {number}", values)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file}: not {kind} in {encoding}, near row {number} ({first_line(error)}): name its encoding, such as "
            "data.options.encoding=utf-16 or cp1252 (--task-option encoding=cp1252 in the evaluation)"
        ) from error
    except Exception as error:  # the readers of csv, json, gzip and pyarrow each have their own types
        raise ConfigError(f"{file}: not {kind}, near row {number} ({first_line(error)})") from error


def _values(file: Path, kind: str, columns: Sequence[str], encoding: str) -> Iterator[dict[str, Any]]:
    if kind == "Parquet":
        import pyarrow.parquet  # here, since a task that isn't read doesn't need it

        with pyarrow.parquet.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(_PARQUET_ROWS):
                yield from batch.to_pylist()
        return
    with _opened(file, encoding) as stream:
        if kind == "JSON":
            yield from _json_values(stream)
        else:
            yield from _table_values(stream, "\t" if kind == "TSV" else ",", columns)


@contextmanager
def _opened(file: Path, encoding: str) -> Iterator[TextIO]:
    """A text file, decompressed, behind its byte order mark; newlines within texts stay as they are."""
    compressed = file.suffix.lower() == ".gz"
    with (
        gzip.open(file, "rt", encoding=encoding, newline="")
        if compressed
        else file.open(encoding=encoding, newline="") as stream
    ):
        start = stream.read(64)
        if "\0" in start:
            raise ValueError("it has NUL characters, as UTF-16 has in other encodings: name its own, such as utf-16-le")
        stream.seek(0)
        if start.startswith("\ufeff"):
            stream.read(1)
        yield stream


def _json_values(stream: TextIO) -> Iterator[dict[str, Any]]:
    """The objects of a list or of JSON lines. Arrow, which `datasets` reads JSON with, makes dates of some texts."""
    start = stream.tell()
    is_list = stream.read(64).lstrip().startswith("[")
    stream.seek(start)
    for values in json.load(stream) if is_list else map(_json_line, filter(str.strip, stream)):
        if not isinstance(values, dict):
            raise ValueError(f"expected an object, got {type(values).__name__}")
        json.dumps(values, ensure_ascii=False).encode()  # which refuses half of a character
        yield values


def _json_line(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a list of objects, or an object a line: {error}") from error


def _table_values(stream: TextIO, delimiter: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a table below the line that names its columns: texts, and None where a row ends before the line."""
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.DictReader(stream, strict=True, delimiter=delimiter)
    names = list(reader.fieldnames or ())
    for column in columns:
        if names.count(column) > 1:
            raise ValueError(f"the first line names the column {column!r} {names.count(column)} times")
    for values in reader:
        if None in values:
            raise ValueError("more fields than the first line names; quote texts that have a delimiter in them")
        yield values
