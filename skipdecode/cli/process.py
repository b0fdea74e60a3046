"""The start of a command, and its end: a status, and one line that says what was in its way."""

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

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run_command(run: Callable[[], int | None], left: Callable[[], str] | None = None) -> int:
    """Do what a command is for and return its exit status.

    What is in its way is one line on standard error: 2 for what the user must change (a ConfigError, a file that can't
    be read or written), 1 for a disk that is full, 130 after Ctrl-C, and 141, without a line, where the reader of the
    output has enough. Any other exception is a fault of the code and comes through.

    Args:
        run: the work; None counts as the status 0.
        left: what there is to go on from, for the line of a command that was broken off.
    """
    line: str | None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # characters that a terminal's encoding lacks
    try:
        status = run() or 0
        sys.stdout.flush()  # else a full disk shows while Python is taken down
        return status
    except ConfigError as error:
        line, status = f"error: {error}", 2
    except KeyboardInterrupt:
        line, status = "interrupted", 130
    except BrokenPipeError:
        line, status = None, 141
    except OSError as error:
        status = 1 if error.errno in _FULL else 2
        line = f"{'stopped' if status == 1 else 'error'}: {_reason(error)}"
    except Exception as error:  # tokenizers and safetensors have no OSError, and say its number
        if not any(f"(os error {number})" in str(error) for number in _FULL):
            raise
        line, status = f"stopped: {first_line(error)}", 1
    if left is not None and line is not None and not line.startswith("error"):
        line = f"{line}: {left()}"
    if line is not None:
        with contextlib.suppress(OSError):  # nobody can be told
            print(line, file=sys.stderr)
    _give_up_output()
    return status


def run_module(name: str) -> int:
    """Import a module and run its `main()` as `run_command` does, so that Ctrl-C is one line while it imports too."""
    return run_command(lambda: importlib.import_module(name).main())


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import torch and transformers while Python's collector rests.

    Of all that they make it goes through everything again and again, and finds nothing to free.
    """
    enabled, first = gc.isenabled(), "transformers" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()  # what modules hold stays to the end: looking through it once more takes as long as a text
        if enabled:
            gc.enable()


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end this process as an error does, so that the processes that it started end with it."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def leave(status: int) -> NoReturn:
    """End the process with a status and without a farewell: Python would take a second to free torch, piece by piece.

    For commands alone, whose files are whole by now; what was registered by `atexit` isn't called.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):  # `run_command` has said what there was to say of it
                stream.flush()
    os._exit(status)


def _reason(error: OSError) -> str:
    """Such as `Permission denied: 'runs/recipe.yaml'`."""
    if error.strerror is None or error.filename is None:
        return first_line(error).removeprefix(f"[Errno {error.errno}] ")
    return f"{error.strerror}: {error.filename!r}"


def _give_up_output() -> None:
    """Drop output that can't be written: Python would try once more as it ends, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
