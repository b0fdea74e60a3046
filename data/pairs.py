"""CSV files with a meaning representation and a text a row, several rows of one meaning being one example."""

import csv
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from skipdecode.errors import ConfigError


def csv_pairs(file: Path, check: Callable[[str], object]) -> Iterator[tuple[str, str]]:
    """Rows of a CSV with columns `mr` and `ref`.

    Args:
        check: raises ConfigError for what is no meaning representation.

    Raises ConfigError that names the file and the line.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, strict=True)
            if reader.fieldnames is None or not {"mr", "ref"} <= set(reader.fieldnames):
                raise ConfigError(f"{file}: the first line must name the columns mr and ref, got {reader.fieldnames}")
            found = False  # blank lines are no rows, and are counted as lines
            for row in reader:
                found = True
                where = f"{file}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise ConfigError(f"{where}: expected {len(reader.fieldnames)} fields; quote texts with commas")
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
        raise ConfigError(f"{file}: not a CSV file in UTF-8 ({error})") from error


def by_meaning(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The texts of each meaning representation, in the order of their first rows, which needn't follow each other."""
    grouped: dict[str, list[str]] = {}
    for meaning, text in pairs:
        grouped.setdefault(meaning, []).append(text)
    return grouped
