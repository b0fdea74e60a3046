"""The results of long work so far, in a file, so that work that is killed goes on where it was."""

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
    """Keys and the plain values that were found for them, each on the disk as soon as it is added.

    A file of JSON lines: first a header that says what the values depend on, then a key and its value a line. Each line
    is on the disk (fsync) before the next one begins, so where a process is killed, or a machine stops, the last line
    alone can be torn, and is dropped. Nothing is written before the first value is added.

    Args:
        path: the file; None for a journal in memory alone.
        header: plain values; a file that begins with others is refused.
        work: the kind of work, for messages.

    Raises:
        ConfigError: for a file of another header, naming what differs, and for one that is no journal.
    """

    def __init__(
        self, path: Path | None = None, header: Mapping[str, Any] | None = None, work: str = "evaluation"
    ) -> None:
        self._path = path
        self._work = work
        # As a file gives it back: without tuples, and with texts for keys.
        self._header: dict[str, Any] = json.loads(json.dumps({"format": _FORMAT, **(header or {})}))
        self._values: dict[Key, Any] = {}
        self._whole = 0  # bytes of the file that are whole lines
        if path is not None and path.exists():
            self._read(path)

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def __getitem__(self, key: Key) -> Any:
        return self._values[key]

    def __len__(self) -> int:
        return len(self._values)

    def add(self, key: Key, value: Any) -> None:
        """Keep the value of a key that isn't there yet."""
        if self._path is not None:
            lines = [[key, value]] if self._whole else [self._header, [key, value]]
            self._append(self._path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        self._values[key] = value

    def entries(self) -> list[tuple[Key, Any]]:
        """All keys with their values, in the order in which they were added."""
        return list(self._values.items())

    def merge(self, entries: Iterable[tuple[Key, Any]]) -> None:
        """Add those whose keys aren't there yet."""
        for key, value in entries:
            if key not in self:
                self.add(key, value)

    def get_or_add(self, key: Key, make: Callable[[], Any]) -> Any:
        """The value of a key, which is made and added where it isn't there yet."""
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
            file.truncate(self._whole)  # a torn line goes
            file.seek(self._whole)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._whole += len(content)

    def _read(self, path: Path) -> None:
        *lines, _torn = path.read_bytes().split(b"\n")
        if not lines:
            return  # killed while its first line was written
        if len(lines) > 1 and not _is_json(lines[-1]):
            del lines[-1]  # its end reached the disk, and not all of it
        advice = "name another --output, or remove it"
        try:
            header, *entries = (json.loads(line) for line in lines)
            values = {tuple(key): value for key, value in entries}
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} is damaged, or no journal of this kind: {advice}") from error
        if header != self._header:
            raise ConfigError(f"{path} is of another {self._work} ({difference(header, self._header)}): {advice}")
        self._values = values
        self._whole = sum(len(line) + 1 for line in lines)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
