"""A file of intermediate results, with which interrupted work continues."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from eval.difference import difference
from skipdecode.errors import ConfigError

FILE_NAME = "journal.jsonl"
_FORMAT = 1

Key: TypeAlias = tuple[str, ...]


class Journal:
    """Keys with JSON values, written to disk as soon as they are added.

    The file holds JSON lines: a header with everything that the values depend on, then a key and its value per line.
    Each line is flushed to disk (fsync) before the next one is written, so if the process is killed or the machine
    stops, only the last line can be incomplete, and it is dropped. The file is created when the first value is added.

    Args:
        path: the file; None for a journal in memory only.
        header: JSON values; a file with another header is refused.
        work: the kind of work, for messages.

    Raises:
        ConfigError: for a file with another header, with the differences, and for a file that isn't a journal.
    """

    def __init__(
        self, path: Path | None = None, header: Mapping[str, Any] | None = None, work: str = "evaluation"
    ) -> None:
        self._path = path
        self._work = work
        # As read back from a file: lists instead of tuples, strings as keys.
        self._header: dict[str, Any] = json.loads(json.dumps({"format": _FORMAT, **(header or {})}))
        self._values: dict[Key, Any] = {}
        self._size = 0  # bytes of complete lines in the file
        if path is not None and path.exists():
            self._read(path)

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def __getitem__(self, key: Key) -> Any:
        return self._values[key]

    def __len__(self) -> int:
        return len(self._values)

    def add(self, key: Key, value: Any) -> None:
        """Add a value for a new key."""
        if self._path is not None:
            lines = [[key, value]] if self._size else [self._header, [key, value]]
            self._append(self._path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        self._values[key] = value

    def entries(self) -> list[tuple[Key, Any]]:
        """All keys and values, in the order of insertion."""
        return list(self._values.items())

    def merge(self, entries: Iterable[tuple[Key, Any]]) -> None:
        """Add the entries with new keys."""
        for key, value in entries:
            if key not in self:
                self.add(key, value)

    def get_or_add(self, key: Key, make: Callable[[], Any]) -> Any:
        """The value of a key, created with `make` if it is missing."""
        if key not in self:
            self.add(key, make())
        return self[key]

    def remove(self) -> None:
        """Delete the file."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _append(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = text.encode("utf-8")
        with path.open("r+b" if path.exists() else "wb") as file:
            file.truncate(self._size)  # removes an incomplete line
            file.seek(self._size)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._size += len(content)

    def _read(self, path: Path) -> None:
        *lines, _incomplete = path.read_bytes().split(b"\n")
        if not lines:
            return  # interrupted while the first line was written
        if len(lines) > 1 and not _is_json(lines[-1]):
            del lines[-1]  # the end of the line reached the disk, but not all of it
        advice = "give another --output, or remove the file"
        try:
            header, *entries = (json.loads(line) for line in lines)
            values = {tuple(key): value for key, value in entries}
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} is damaged, or not a journal of this kind: {advice}") from error
        if header != self._header:
            raise ConfigError(f"{path} belongs to another {self._work} ({difference(header, self._header)}): {advice}")
        self._values = values
        self._size = sum(len(line) + 1 for line in lines)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
