"""Atomic writing of files, and reading of text files line by line."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def atomic_replacement(path: Path) -> Iterator[Path]:
    """Yield the path of a new file beside `path`; when the context ends without an error, it replaces `path`.

    Raises OSError, which names `path`, for example where the disk is full.
    """
    partial = path.with_name(f"{path.name}.{uuid4().hex[:8]}.partial")  # unique to this writer
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:  # the system's error for a full disk names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder_replacement(path: Path) -> Iterator[Path]:
    """Yield a new folder beside `path`; when the context ends without an error, it replaces `path` with all contents.

    Raises OSError, which names `path`, for example where the disk is full.
    """
    path = path.resolve()  # replace the target of a link, not the link
    partial = path.with_name(f"{path.name}.{uuid4().hex[:8]}.partial")  # unique to this writer
    old = partial.with_suffix(".old")
    try:
        partial.mkdir()
        yield partial
        if path.exists():
            os.replace(path, old)
        os.replace(partial, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        if old.exists() and not path.exists():
            os.replace(old, path)
        for folder in (partial, old):
            shutil.rmtree(folder, ignore_errors=True)


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, split at newlines only.

    `str.splitlines` also splits at U+2028, U+2029, U+0085 and others, which JSON strings may contain.
    """
    with path.open(encoding="utf-8", newline="\n") as file:
        return [line.removesuffix("\n") for line in file]


def write_atomically(path: Path, text: str) -> None:
    """Write a text file atomically: readers see the old file or the new one, never a part.

    Surrogates, which stand for bytes of file names that aren't UTF-8, are written as escapes.
    """
    with atomic_replacement(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
