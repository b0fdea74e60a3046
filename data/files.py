"""Rows of local files: CSV, TSV and JSON (also gzip-compressed), and Parquet; single files or shards."""

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
# File name endings, matched without case, and their formats.
FORMATS = {**_TEXT_FORMATS, **{f"{ending}.gz": name for ending, name in _TEXT_FORMATS.items()}, ".parquet": "Parquet"}
ENDINGS = f"{', '.join(_TEXT_FORMATS)} (also followed by .gz) or .parquet"  # for messages
_SHARD = re.compile(r"-([0-9]+)-of-([0-9]+)(?:-[0-9a-f]{16})?$")  # the Hub's names of shards, formerly with a hash
_PARQUET_ROWS = 1000  # rows read at once, few enough for long articles
MAX_FIELD_CHARACTERS = 2**31 - 1  # the csv module's default limit is 131,072


@dataclass(frozen=True)
class Row:
    """One row of a data source, with its location for messages."""

    where: str
    values: dict[str, Any]

    def text(self, column: str) -> str:
        """The text in a column, unchanged. Raises ConfigError where it is missing, not a string, or blank."""
        if column not in self.values:
            raise ConfigError(f"{self.where}: no column {column!r}, only {', '.join(map(str, self.values))}")
        value = self.values[column]
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.where}: {column} is {reprlib.repr(value)}: it must be text")
        if value is None or not value.strip():
            raise ConfigError(f"{self.where}: {column} must not be empty or blank")
        return value


def ending_of(file: Path) -> str | None:
    """The key of FORMATS with which a file's name ends, or None."""
    return next((ending for ending in FORMATS if file.name.lower().endswith(ending)), None)


def in_order(files: Sequence[Path]) -> tuple[Path, ...]:
    """A single file, or the shards of one data set in the order of their numbers.

    Shards are numbered from 0 or from 1, as in `train-00000-of-00002.parquet`.

    Raises ConfigError, which names the files, for several files that aren't shards of one data set, and for a missing
    or duplicate shard.
    """
    shards: dict[tuple[str, str, int], dict[int, Path]] = {}  # (stem, ending, total) -> number -> file
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
            raise ConfigError(f"{file}: {number} isn't a valid number of one of {total} shards, which start at 0 or 1")
    if len(numbered) < total:
        missing = next(number for number in count(first) if number not in numbered)
        raise ConfigError(
            f"{next(iter(numbered.values()))} is one of {total} shards; missing shards: {total - len(numbered)}, the "
            f"first is number {missing:05d}; add them"
        )
    return tuple(numbered[number] for number in sorted(numbered))


def _two_files(one: Path, other: Path) -> ConfigError:
    return ConfigError(
        f"{one.parent} has two files for one split, {one.name} and {other.name}: keep one; shards must be named as on "
        "the Hub, train-00000-of-00002.parquet and train-00001-of-00002.parquet"
    )


def check_encoding(encoding: str) -> None:
    """Raises ConfigError for a text encoding that Python doesn't know."""
    try:
        "".encode(encoding)
    except (LookupError, ValueError) as error:
        raise ConfigError(
            f"encoding is {encoding!r}: it must be an encoding that Python knows, such as utf-8, utf-16 or cp1252"
        ) from error


def file_rows(file: Path, columns: Sequence[str] = (), encoding: str = "utf-8") -> Iterator[Row]:
    """The rows of a file, read lazily; the format follows from the ending of its name.

    Args:
        file: the file.
        columns: the needed columns, each of which a table must have exactly once.
        encoding: encoding of a text file; a byte order mark is skipped.

    Raises:
        ConfigError: for a file that can't be read; the message names it.
    """
    kind = FORMATS[ending_of(file) or ""]
    number = 0
    try:
        for number, values in enumerate(_values(file, kind, columns, encoding), start=1):
            yield Row(f"{file}, row {number}", values)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} can't be read as {kind} in {encoding}, near row {number} ({first_line(error)}): set its encoding, "
            "such as data.options.encoding=utf-16 or cp1252 (--task-option encoding=cp1252 in the evaluation)"
        ) from error
    except Exception as error:  # csv, json, gzip and pyarrow each raise their own types
        raise ConfigError(f"{file} can't be read as {kind}, near row {number} ({first_line(error)})") from error


def _values(file: Path, kind: str, columns: Sequence[str], encoding: str) -> Iterator[dict[str, Any]]:
    if kind == "Parquet":
        import pyarrow.parquet  # imported here, because other formats don't need it

        with pyarrow.parquet.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(_PARQUET_ROWS):
                for values in batch.to_pylist():
                    yield {name: _without_nulls(value) for name, value in values.items()}
        return
    with _opened(file, encoding) as stream:
        if kind == "JSON":
            yield from _json_values(stream)
        else:
            yield from _table_values(stream, "\t" if kind == "TSV" else ",", columns)


def _without_nulls(value: Any) -> Any:
    """A value of a Parquet file without the null fields of its objects, as Arrow gives all of them the same fields."""
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return value


@contextmanager
def _opened(file: Path, encoding: str) -> Iterator[TextIO]:
    """Open a text file, decompressed and after its byte order mark; newlines in it stay unchanged."""
    compressed = file.suffix.lower() == ".gz"
    with (
        gzip.open(file, "rt", encoding=encoding, newline="")
        if compressed
        else file.open(encoding=encoding, newline="") as stream
    ):
        start = stream.read(64)
        if "\0" in start:
            raise ValueError("it has NUL characters, so it may be UTF-16: set its encoding, such as utf-16-le")
        stream.seek(0)
        if start.startswith("\ufeff"):
            stream.read(1)
        yield stream


def _json_values(stream: TextIO) -> Iterator[dict[str, Any]]:
    """The objects in a JSON list or in JSON lines; `datasets`, which uses Arrow, would turn some strings into dates."""
    start = stream.tell()
    is_list = stream.read(64).lstrip().startswith("[")
    stream.seek(start)
    for values in json.load(stream) if is_list else map(_json_line, filter(str.strip, stream)):
        if not isinstance(values, dict):
            raise ValueError(f"expected an object, got {type(values).__name__}")
        json.dumps(values, ensure_ascii=False).encode()  # raises for unpaired surrogates
        yield values


def _json_line(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a list of objects, or one object per line: {error}") from error


def _table_values(stream: TextIO, delimiter: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a table after its header; values are strings, or None where a row is shorter than the header."""
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    reader = csv.DictReader(stream, strict=True, delimiter=delimiter)
    names = list(reader.fieldnames or ())
    for column in columns:
        if names.count(column) > 1:
            raise ValueError(f"the first line names the column {column!r} {names.count(column)} times")
    for values in reader:
        if None in values:
            raise ValueError("more fields than the first line names; quote text that contains the delimiter")
        yield values
