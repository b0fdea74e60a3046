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
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from skipdecode.errors import ConfigError, first_line

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DYNAMO = "torch._dynamo"


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
    except Exception as error:  # tokenizers and safetensors raise other errors that name the OS error's number
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
def quick_imports(*, compiles: bool = False) -> Iterator[None]:
    """Import torch and transformers without what no command of one process needs, in half of the time.

    Python's collector rests: of all that they make it goes through everything again and again, and finds nothing to
    free. transformers is told that torch.distributed isn't there, as in builds of torch that have none, for the rest of
    the process. And `torch._dynamo` is a placeholder (`_Unmarked`) until the block ends. Where transformers has been
    imported before, nothing is gained, and only the collector rests.

    Args:
        compiles: whether code of others is loaded in the block, which may compile: `torch._dynamo` is no placeholder.
    """
    enabled, first = gc.isenabled(), "transformers" not in sys.modules
    gc.disable()
    try:
        if first:
            _leave_out_distributed()
            if not compiles:
                sys.modules[_DYNAMO] = _Unmarked(_DYNAMO)
        yield
    finally:
        if first:
            _Unmarked.leave()
            gc.freeze()  # what modules hold stays to the end: looking through it once more takes as long as a text
        if enabled:
            gc.enable()


def _leave_out_distributed() -> None:
    import torch
    from transformers.utils import is_torch_distributed_available

    asked, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    is_torch_distributed_available()  # once for the process: it keeps the answer
    torch.distributed.is_available = asked


class _Unmarked(ModuleType):
    """In place of `torch._dynamo`, of which transformers wants marks for torch.compile on a few functions as it is
    imported: without marks these are what they are, as nothing is compiled here. Who asks for more gets the module.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        import torch

        self.__path__ = [str(Path(folder) / "_dynamo") for folder in torch.__path__]  # its parts can be imported
        torch.__dict__["_dynamo"] = self

    def disable(self, function: Any = None, *_: Any, **__: Any) -> Any:
        return function or (lambda function: function)

    def allow_in_graph(self, function: Any) -> Any:
        return function

    assume_constant_result = allow_in_graph

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(_DYNAMO), name)

    @staticmethod
    def leave() -> None:
        """Make room for the module, which then imports parts of its own."""
        import torch

        if isinstance(sys.modules.get(_DYNAMO), _Unmarked):
            del torch.__dict__["_dynamo"]
            for name in [name for name in sys.modules if name == _DYNAMO or name.startswith(f"{_DYNAMO}.")]:
                del sys.modules[name]


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
