"""`python …` as processes forked off one that has imported everything heavy, and has done nothing else."""

import atexit
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import traceback
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
# DeepSpeed's Muon compiles when it is imported, which each run would do first.
_FORKS.set_forkserver_preload(
    ["deepspeed.runtime.zero.muon.muon_optimizer", "eval.run", "train.dry_run.rehearsal", "train.run"]
)


def start_python(words: list[str], log: Path, **environment: str) -> BaseProcess:
    """Start what `python` does with the words, of which a file, -m or -c is the first; `log` gets all that it says."""
    process = _FORKS.Process(target=_run, args=(words, os.getcwd(), log, {**os.environ, **environment}))
    process.start()
    return process


def run_python(words: list[str], log: Path, processes: int = 1) -> int:
    """Run it to its end, several times beside each other as torchrun does; the status of the first that fails, or 0."""
    environments: list[dict[str, str]] = [{}]
    if processes > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        ranks = range(processes)
        environments = [{"RANK": str(n), "LOCAL_RANK": str(n), "WORLD_SIZE": str(processes), **meeting} for n in ranks]
    running = {process.sentinel: process for process in (start_python(words, log, **each) for each in environments)}
    try:
        while running:
            ended = wait(list(running), timeout=300)
            assert ended, log.read_text()
            for sentinel in ended:
                process = running.pop(sentinel)  # type: ignore[index]
                process.join()
                if process.exitcode:
                    return process.exitcode
    finally:
        for process in running.values():  # they wait for the one that failed
            process.kill()
            process.join()
    return 0


def _run(words: list[str], folder: str, log: Path, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(said, stream)
    first, *rest = words
    sys.argv = rest if first == "-m" else words
    try:
        if first == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(rest[0], {"__name__": "__main__"})
        elif first == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(first, run_name="__main__")
    except Exception:  # which an interpreter prints before it runs what atexit holds
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()
