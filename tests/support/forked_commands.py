"""Commands of the project as processes that are forked off one which has imported everything heavy."""

import atexit
import builtins
import importlib
import os
import resource
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from starlette.testclient import TestClient

from skipdecode import (
    ConfigError,
    CostModel,
    Engine,
    SkipSchedule,
    load,
    measure_cost,
    skip_generate,
    skip_layers,
    solve_schedule,
)
from skipdecode.serve.app import make_app
from skipdecode.serve.settings import ServeSettings

for _module in (
    "eval.report.page",
    "eval.run",
    "eval.search",
    "eval.speed",
    "train.dry_run.rehearsal",
    "train.publish.send",
    "train.run",
):
    importlib.import_module(_module)

ROOT = Path(__file__).resolve().parents[2]
FILES = {"train": ROOT / "train.py", "publish": ROOT / "scripts" / "publish.py"}
SKIPDECODE = "from skipdecode.cli.options import run_and_leave; run_and_leave()"  # as the installed command does


class Forked:
    """A command in a folder and its words: `train`, `publish`, `skipdecode`, `library`, `request` or a module of the
    evaluation.

    Args:
        stdin: what it reads; "open" is a pipe into which nothing comes.
        stdout: a file in place of a pipe.
        disk: bytes that a file may grow to.
        fresh: a new interpreter, so that its imports are there to be interrupted too.

    Attributes:
        stdout, stderr: what it has said.
        status: as a shell has it; negative where a signal ended it; None while it runs.
    """

    def __init__(
        self,
        words: list[str],
        folder: Path,
        *,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        stdout: str | None = None,
        disk: int | None = None,
        fresh: bool = False,
    ) -> None:
        self.status: int | None = None
        self._said = {1: b"", 2: b""}
        reads, writes = zip(*(os.pipe() for _ in range(3)), strict=True)
        self._pipes = dict(zip((1, 2), reads[1:], strict=True))
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            os.setpgid(0, 0)
            for number, end in enumerate((reads[0], *writes[1:])):
                os.dup2(end, number)
            if stdin != "open":
                os.write(writes[0], stdin.encode())
                os.close(writes[0])
            if stdout is not None:
                os.dup2(os.open(stdout, os.O_WRONLY), 1)
            _run(words, folder, env or {}, disk, fresh)
        for end in (reads[0], *writes):
            os.close(end)
        for end in self._pipes.values():
            os.set_blocking(end, False)

    @property
    def stdout(self) -> str:
        return self._said[1].decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self._said[2].decode(errors="replace")

    def ended(self) -> bool:
        """Whether it has ended; reads what it has said since."""
        if self.status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        for stream, end in self._pipes.items():
            with suppress(BlockingIOError):
                while said := os.read(end, 2**16):
                    self._said[stream] += said
        return self.status is not None

    def signal(self, name: str) -> None:
        os.kill(self._pid, signal.Signals[f"SIG{name}"])

    def end(self) -> None:
        """Kill it and what it started, where any of that still runs."""
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        while not self.ended():
            pass
        for end in self._pipes.values():
            os.close(end)
        self._pipes = {}


def _run(words: list[str], folder: Path, env: Mapping[str, str], disk: int | None, fresh: bool) -> None:
    """The forked process: never returns."""
    os.chdir(folder)
    os.environ |= env
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if disk is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (disk, disk))
    name, *arguments = words
    if fresh:
        os.environ["PYTHONPATH"] = str(ROOT)
        how = [str(FILES[name])] if name in FILES else ["-c", SKIPDECODE] if name == "skipdecode" else ["-m", name]
        os.execv(sys.executable, [sys.executable, *how, *arguments])
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    atexit._clear()  # what the parent has to do at its end isn't this one's
    status = _status_of(name, arguments)
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except OSError as error:
        print(f"Exception ignored: {error}", file=sys.stderr)  # as an interpreter ends
        status = 120
    os._exit(status)


def _status_of(name: str, arguments: list[str]) -> int:
    """Run it as a new interpreter would."""
    try:
        sys.argv = [str(FILES.get(name, name)), *arguments]
        if name == "library":
            _library(arguments[0])
        elif name == "request":
            _request(arguments[0])
        elif name == "skipdecode":
            exec(SKIPDECODE, {"__name__": "__main__"})
        elif name in FILES:
            runpy.run_path(str(FILES[name]), run_name="__main__")
        else:
            sys.modules.pop(name, None)  # runpy warns of one that is there already
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _library(code: str) -> None:
    """Evaluate a call of the library; a ConfigError, or what transformers refuses in its own words, is a line."""
    known = (load, SkipSchedule, CostModel, solve_schedule, skip_layers, measure_cost)
    names: dict[str, Any] = {each.__name__: each for each in known}
    names |= {"torch": torch, "FULL": SkipSchedule.full_depth(8)}
    if "model" in code or "gen(" in code:
        model, tokenizer = load("run")
        inputs = tokenizer(["vehicle: ferry\n"], return_tensors="pt")

        def gen(**request: Any) -> Any:
            request = {"max_new_tokens": 4, **request}
            return model.generate(**inputs, custom_generate=skip_generate, **request)

        names |= {"model": model, "gen": gen}
    try:
        print(builtins.eval(code, names))
    except ValueError as error:
        if not isinstance(error, ConfigError) and "gen(" not in code:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _request(words: str) -> None:
    """Send a body to an address of a server of the checkpoint `run`; what it refuses is a line."""
    address, _, body = words.partition(" ")
    model, tokenizer = load("run")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    with TestClient(make_app(Engine(model, tokenizer), tokenizer, ServeSettings("run"))) as client:
        answer = client.post(f"/v1/{address}", content=body.encode())
    if answer.status_code == 200:
        print(answer.text)
        return
    print(f"error: {answer.json()['error']['message']}", file=sys.stderr)
    sys.exit(2 if answer.status_code < 500 else 1)
