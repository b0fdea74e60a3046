"""Measure the throughput of one and of two replicas of the server, and what happens when one of two is killed.

    python scripts/benchmark_replicas.py outputs/e2e-tiny --data-dir E2E_FOLDER --requests 300

It needs skipdecode[ray], and serves a checkpoint by `skipdecode serve` without Ray, with one replica and with two, all
at the same time and with one thread each. They take turns: each gets the same requests at once, unstreamed. Then one of
the two replicas is killed after a quarter of the requests. The table has the tokens per second, answers and errors of
every turn. No request may be left without either.
"""

import argparse
import asyncio
import contextlib
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
from rich.console import Console
from rich.table import Table

from data import load_task
from eval.load.client import Endpoint, Outcome, play
from eval.loading import task_options
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.cli.process import run_command
from skipdecode.errors import ConfigError
from skipdecode.timing.interleave import order_of_turn

NAME = "served"
SYSTEMS = {"without Ray": [], "1 replica": ["--replicas", "1"], "2 replicas": ["--replicas", "2"]}


@dataclass
class Server:
    """A server process and its address."""

    process: "subprocess.Popen[str]"
    endpoint: Endpoint

    def replicas(self) -> list[psutil.Process]:
        """The processes of its replicas."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if child.name().startswith("ray::ServeReplica")]

    def ready(self) -> int:
        """Number of replicas that answer."""
        with urllib.request.urlopen(f"{self.endpoint.url.removesuffix('/v1')}/metrics") as answer:
            return len(set(re.findall(r'skipdecode_tokens_total{replica="(\w+)"}', answer.read().decode())))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoint", metavar="DIR")
    add("--data-dir", metavar="DIR", help="the task's local folder; default: the Hub, or built in")
    add("--speedup", type=float, default=2.0, metavar="X", help="of all requests (default 2)")
    add("--requests", type=int, default=300, metavar="N", help="requests of a turn (default 300)")
    add("--rounds", type=int, default=3, metavar="N", help="turns of each server (default 3)")
    options = parser.parse_args()
    name, settings = task_options(None, SkipConfig.load(options.checkpoint))
    task = load_task(name, path=options.data_dir, **settings)
    examples = [example.prompt for example in task.stream("test")]
    prompts = [examples[number % len(examples)] for number in range(options.requests)]
    table = Table("server", "round", "tokens/s", "answers", "errors")
    with contextlib.ExitStack() as stack:
        servers = {
            system: stack.enter_context(started(options.checkpoint, more, options.speedup, task.max_new_tokens))
            for system, more in SYSTEMS.items()
        }
        for server in servers.values():
            turn(server, prompts[:16])  # warm-up
        for number in range(options.rounds):
            for system in order_of_turn(list(SYSTEMS), number):
                table.add_row(system, str(number + 1), *turn(servers[system], prompts))
        server = servers["2 replicas"]
        table.add_row("2 replicas, one killed", "", *turn(server, prompts, kill_after=len(prompts) // 4))
        killed = time.monotonic()
        while server.ready() < 2:
            time.sleep(0.5)
        replaced = time.monotonic() - killed
        table.add_row("2 replicas, replaced", "", *turn(server, prompts))
    Console(width=120).print(table)
    print(f"two replicas again {replaced:.0f} s after the last answer of the turn in which one was killed")
    return 0


@contextlib.contextmanager
def started(checkpoint: str, more: Sequence[str], speedup: float, max_new_tokens: int) -> Iterator[Server]:
    """Start a server with one thread, or replicas of one. It ends with the context."""
    command = [sys.executable, "-m", "skipdecode", "serve", checkpoint, "--name", NAME, "--port", "0", *more]
    command += ["--threads", "1", "--speedup", str(speedup), "--queue", "100000", "--timeout", "86400"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        while not (found := re.search(r"on (http://[\d.:]+/v1)", line := process.stderr.readline())):
            if not line:
                raise ConfigError(f"the server of {' '.join(more) or 'one process'} didn't start")
        body = {"model": NAME, "max_tokens": max_new_tokens, "temperature": 0}
        yield Server(process, Endpoint(found[1], body, stream=False))
    finally:
        process.terminate()
        process.wait(60)


def turn(server: Server, prompts: Sequence[str], kill_after: int | None = None) -> tuple[str, str, str]:
    """Send all prompts at once, and kill a replica after so many answers. Returns tokens/s, answers and errors."""
    count = 0

    def advance() -> None:
        nonlocal count
        count += 1
        if count == kill_after:
            server.replicas()[0].kill()

    start = time.perf_counter()
    outcomes: list[Outcome] = asyncio.run(play(server.endpoint, prompts, [0.0] * len(prompts), 600, advance))
    seconds = time.perf_counter() - start
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    good = [outcome for outcome in outcomes if outcome.error is None]
    said = ", ".join(f"{number} x {error}" for error, number in errors.items())
    return f"{sum(outcome.tokens for outcome in good) / seconds:.0f}", str(len(good)), said or "none"


if __name__ == "__main__":
    sys.exit(run_command(main))
