"""Checks and locks of output files and folders."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from skipdecode.errors import ConfigError

LOCK = ".lock"
LOCK_TIMEOUT = 10.0  # seconds: a killed process holds its lock until its memory is freed


def check_new_files(field: str, *paths: Path) -> None:
    """Raise ConfigError where a file already exists or can't be written."""
    for path in paths:
        if path.exists():
            raise ConfigError(f"{field}: {path} already exists: name another file")
        _check_writable(path)


def check_benchmark_output(output: Path) -> None:
    """Raise ConfigError for an output of a benchmark that isn't .json, or that exists and isn't unfinished."""
    if output.suffix != ".json":
        raise ConfigError(f"--output {output}: name a .json file; a .md and a .png are written beside it")
    if not journal_of(output).exists():
        check_new_files("--output", *(output.with_suffix(suffix) for suffix in (".json", ".md", ".png")))


def journal_of(output: Path) -> Path:
    """The journal beside the output of a benchmark, which exists until the benchmark is finished."""
    return output.with_suffix(".journal.jsonl")


@contextmanager
def only_benchmark(output: Path) -> Iterator[None]:
    """Lock the output of a benchmark. Raises ConfigError where another process holds it, or has just finished it."""
    with only_writer(output.parent, "--output", output.name):
        check_benchmark_output(output)
        yield


def _check_writable(path: Path) -> None:
    """Raise ConfigError where a file can't be written, before the work starts."""
    folder = path.resolve().parent
    while not folder.exists():
        folder = folder.parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error


@contextmanager
def only_writer(folder: Path, field: str, file: str = "") -> Iterator[None]:
    """Create `folder` if needed and hold an exclusive lock on it within the context.

    With `file`, a file name in the folder, only that file and those beside it are locked.

    The lock is a kernel lock (flock), which ends with the process. On NFS the server holds it, so it works between
    machines; that of a crashed machine ends when the server notices. A file system without flock uses a lock file
    instead, which a killed process leaves behind: the next process on the same machine takes it over, on another
    machine it must be removed by hand.

    A folder created here is removed again if nothing was written into it.

    Raises:
        ConfigError: naming `field`, where another process holds the lock, and where the folder isn't writable.
    """
    if folder.is_file():
        raise ConfigError(f"{field} {folder} is a file: name a folder")
    created = [path for path in (folder, *folder.parents) if not path.exists()]  # innermost first
    path = folder / f"{file}{LOCK}"
    lock = FileLock(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=LOCK_TIMEOUT)
        if not isinstance(lock, SoftFileLock):  # the fallback of filelock without flock
            path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n", encoding="utf-8")
    except Timeout as error:
        raise ConfigError(
            f"{field} {folder / file}: another run is writing here ({_holder(path)}): wait until it ends, or name "
            f"another {'file' if file else 'folder'}"
        ) from error
    except OSError as error:
        _release(lock, created)
        raise ConfigError(f"{field} {folder / file} can't be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        _release(lock, created)


def _holder(path: Path) -> str:
    """The holder of a lock, from the two lines in its file."""
    with suppress(OSError, ValueError):
        process, host, *_ = path.read_text(encoding="utf-8").splitlines()
        return f"process {process} on {host}"
    return f"it holds {path}"


def _release(lock: BaseFileLock, created: list[Path]) -> None:
    """Release the lock, delete its file, and remove the created folders if they are empty."""
    if lock.is_locked and not isinstance(lock, SoftFileLock):  # a SoftFileLock deletes its file itself
        with suppress(OSError):
            Path(lock.lock_file).unlink()  # before the release, so that a waiting process notices
    lock.release()
    for folder in created:
        with suppress(OSError):  # not empty
            folder.rmdir()
