"""The start and the end of a command: quick imports, exit status, and errors as one line."""

import contextlib
import errno
import gc
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from skipdecode.errors import ConfigError, first_line

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run_command(run: Callable[[], int | None], left: Callable[[], str] | None = None) -> int:
    """Run a command, and report an error as one line on standard error.

    Args:
        run: does the work and returns the exit status; None counts as 0.
        left: returns what an interrupted command leaves to continue from, which is added to the line.

    Returns:
        The exit status of `run`; 2 for errors that the user must fix (a ConfigError, a file that can't be read or
        written), 1 for a full disk, 130 after Ctrl-C, and 141, without a line, if the reader of the output has closed
        it.

    Raises:
        Exception: any other error, as it is a defect of the code.
    """
    line: str | None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # escapes characters that the terminal's encoding lacks
    try:
        status = run() or 0
        sys.stdout.flush()  # otherwise a full disk would be reported during the shutdown of Python
        return status
    except ConfigError as error:
        line, status = f"error: {error}", 2
    except KeyboardInterrupt:
        line, status = "interrupted", 130
    except BrokenPipeError:
        line, status = None, 141
    except OSError as error:
        status = 1 if error.errno in _DISK_FULL else 2
        line = f"{'stopped' if status == 1 else 'error'}: {_reason(error)}"
    except Exception as error:  # tokenizers and safetensors raise errors of their own, with the number
        if not any(f"(os error {number})" in str(error) for number in _DISK_FULL):
            raise
        line, status = f"stopped: {first_line(error)}", 1
    if left is not None and line is not None and not line.startswith("error"):
        line = f"{line}: {left()}"
    if line is not None:
        with contextlib.suppress(OSError):  # standard error is closed
            print(line, file=sys.stderr)
    _discard_output()
    return status


def run_module(name: str) -> int:
    """Import a module and run its `main` by `run_command`, so that Ctrl-C during the import prints one line too."""
    return run_command(lambda: importlib.import_module(name).main())


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Pause Python's garbage collector during the import of torch and transformers.

    It would scan the many objects that they create again and again, and find nothing to free.
    """
    enabled, first_import = gc.isenabled(), "transformers" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first_import:
            gc.freeze()  # excludes modules from later collections, as they stay until the end of the process
        if enabled:
            gc.enable()


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit in the block, so that cleanup code runs and ends the processes it has started."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def leave(status: int) -> NoReturn:
    """End the process at once, without Python's shutdown, which takes about a second to free torch.

    Only for commands that have closed all their files. Functions registered with `atexit` are not called.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):  # `run_command` has reported it
                stream.flush()
    os._exit(status)


def _reason(error: OSError) -> str:
    """The error's text and file, such as `Permission denied: 'runs/recipe.yaml'`."""
    if error.strerror is None or error.filename is None:
        return first_line(error).removeprefix(f"[Errno {error.errno}] ")
    return f"{error.strerror}: {error.filename!r}"


def _discard_output() -> None:
    """Discard output that can't be written, as Python would try again at its end and print an error."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
