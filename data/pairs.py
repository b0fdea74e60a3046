"""CSV files with a meaning representation and a text per row; rows of equal meaning form one example."""

import csv
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from skipdecode.errors import ConfigError


def csv_pairs(file: Path, check: Callable[[str], object]) -> Iterator[tuple[str, str]]:
    """The rows of a CSV file with columns `mr` and `ref`.

    Args:
        file: the file.
        check: raises ConfigError for an invalid meaning representation.

    Raises:
        ConfigError: for a file that can't be read and an invalid row, naming the file and the line.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, strict=True)
            if reader.fieldnames is None or not {"mr", "ref"} <= set(reader.fieldnames):
                raise ConfigError(f"{file}: the first line must name the columns mr and ref, got {reader.fieldnames}")
            found = False
            for row in reader:
                found = True
                where = f"{file}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise ConfigError(
                        f"{where}: expected {len(reader.fieldnames)} fields; quote text with commas in it"
                    )
                if not row["mr"].strip() or not row["ref"].strip():
                    raise ConfigError(f"{where}: mr and ref must not be empty")
                try:
                    check(row["mr"])
                except ConfigError as error:
                    raise ConfigError(f"{where}: {error}") from error
                yield row["mr"].strip(), row["ref"].strip()
            if not found:
                raise ConfigError(f"{file} has no rows")
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{file} can't be read as CSV in UTF-8 ({error})") from error


def by_meaning(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The texts of each meaning representation, in the order of first rows; equal meanings needn't be adjacent."""
    grouped: dict[str, list[str]] = {}
    for meaning, text in pairs:
        grouped.setdefault(meaning, []).append(text)
    return grouped
