"""Files that are there whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give the name of a file beside `path`, to be written; it takes the place of `path` when the context ends well.

    Raises OSError, naming `path`, where the disk is full.
    """
    partial = path.with_name(f"{path.name}.{uuid4().hex[:8]}.partial")  # of this writer alone
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:  # which names no file where the disk is full
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """Give a new folder beside `path`, to be filled; it takes the place of `path`, and of all that is in it, when the
    context ends well.

    Raises OSError, naming `path`, where the disk is full.
    """
    path = path.resolve()  # a link stays one
    partial = path.with_name(f"{path.name}.{uuid4().hex[:8]}.partial")  # of this writer alone
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
    """The lines of a text file, which end at newlines.

    `str.splitlines` also ends them at U+2028, U+2029, U+0085 and others, which JSON leaves as they are within a text.
    """
    with path.open(encoding="utf-8", newline="\n") as file:
        return [line.removesuffix("\n") for line in file]


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that it is there whole or not at all. Names of files that are no UTF-8 are escaped in it."""
    with replaced(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
