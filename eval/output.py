"""Places that a command writes to: files that are new, and a folder that it alone writes into."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from skipdecode.errors import ConfigError

LOCK = ".lock"
PATIENCE = 10.0  # seconds: a process that was killed holds its lock until the last of its memory is given back


def check_new_files(field: str, *paths: Path) -> None:
    """Raises ConfigError where a file is there already, or can't be written."""
    for path in paths:
        if path.exists():
            raise ConfigError(f"{field}: {path} is there already: name another file")
        _check_writable(path)


def check_benchmark_output(output: Path) -> None:
    """Raises ConfigError for a benchmark's output that is no JSON, or is there already and isn't unfinished."""
    if output.suffix != ".json":
        raise ConfigError(f"--output {output}: name a .json file; a .md and a .png are written beside it")
    if not journal_of(output).exists():
        check_new_files("--output", *(output.with_suffix(suffix) for suffix in (".json", ".md", ".png")))


def journal_of(output: Path) -> Path:
    """A file beside a benchmark's output that is there while the benchmark isn't finished."""
    return output.with_suffix(".journal.jsonl")


@contextmanager
def only_benchmark(output: Path) -> Iterator[None]:
    """Be the only one that writes a benchmark's output. Raises ConfigError where another is, or has ended since."""
    with only_writer(output.parent, "--output", output.name):
        check_benchmark_output(output)
        yield


def _check_writable(path: Path) -> None:
    """Raises ConfigError where a file can't be written: a command should know before its work and not after it."""
    folder = path.resolve().parent
    while not folder.exists():
        folder = folder.parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error


@contextmanager
def only_writer(folder: Path, field: str, file: str = "") -> Iterator[None]:
    """Be the only process that writes into `folder`, which is made where it isn't there, for the time of the context.

    With `file`, the name of one in it, be the only one that writes that and what lies beside it.

    The lock is the kernel's (flock): it ends with the process, however that ends. On NFS the server keeps it, so it
    holds between machines, and that of a machine that died ends when the server notices. A file system without flock
    has a file in its place, which a killed process leaves behind: the next one on the same machine takes it over, on
    another machine it has to be removed by hand.

    A folder that was made here goes again where nothing was written into it.

    Raises:
        ConfigError: naming `field`, where another process writes there, and where nothing can be written.
    """
    if folder.is_file():
        raise ConfigError(f"{field} {folder} is a file: name a folder")
    made = [path for path in (folder, *folder.parents) if not path.exists()]  # the innermost first
    path = folder / f"{file}{LOCK}"
    lock = FileLock(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=PATIENCE)
        if not isinstance(lock, SoftFileLock):  # as it turns itself into where there is no flock
            path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n", encoding="utf-8")
    except Timeout as error:
        raise ConfigError(
            f"{field} {folder / file}: another run is writing here ({_holder(path)}): wait for its end, or name "
            f"another {'file' if file else 'folder'}"
        ) from error
    except OSError as error:
        _release(lock, made)
        raise ConfigError(f"{field} {folder / file} can't be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        _release(lock, made)


def _holder(path: Path) -> str:
    """The holder of a lock, as its first two lines say."""
    with suppress(OSError, ValueError):
        process, host, *_ = path.read_text(encoding="utf-8").splitlines()
        return f"process {process} on {host}"
    return f"it holds {path}"


def _release(lock: BaseFileLock, made: list[Path]) -> None:
    """Give the lock back, without a trace, and remove the folders that were made for it if nothing else is in them."""
    if lock.is_locked and not isinstance(lock, SoftFileLock):  # which removes its file itself
        with suppress(OSError):
            Path(lock.lock_file).unlink()  # while it is held: who opened it before sees that it is gone
    lock.release()
    for folder in made:
        with suppress(OSError):  # as far as nothing is in them
            folder.rmdir()
