"""Run a load test and write its report."""

import asyncio
import datetime
import shlex
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TimeRemainingColumn

from data import load_task
from eval.console import bar_columns, make_console
from eval.journal import Journal
from eval.load.arrivals import drawn_prompts, poisson_arrivals
from eval.load.client import Endpoint, Outcome, play
from eval.load.report import LoadConditions, LoadReport, draw_load, fallback_speedup, row_of
from eval.load.request import LoadRequest
from eval.load.systems import served
from eval.loading import fingerprint, task_options, weights_identity
from eval.machine import describe_machine, machine_identity, versions
from eval.output import journal_of, only_benchmark
from skipdecode import ConfigError
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.cli.device import resolve_device
from skipdecode.files import write_atomically
from skipdecode.timing.interleave import order_of_turn

WARM_UP = 8  # simultaneous requests before a system is timed


def benchmark(request: LoadRequest) -> None:
    """Test every system in turns; write the report as JSON, Markdown and a picture, and print it.

    An interrupted benchmark continues when it is started again: a journal beside the report holds the measurements
    until all are done.

    Raises ConfigError for a request that can't be met, and for a system that doesn't answer.
    """
    with only_benchmark(request.output):
        _benchmark(request)


def _benchmark(request: LoadRequest) -> None:
    folder = request.checkpoint
    if folder is not None and not Path(folder).is_dir() and folder.count("/") != 1:
        raise ConfigError(f"--checkpoint {folder} is neither a folder nor the name of a repository on the Hub")
    remembered = SkipConfig.load(request.checkpoint) if request.checkpoint is not None else None
    name, options = task_options(request.task, remembered, request.task_options)
    task = load_task(name, path=request.data_dir, **options)
    prompts = [example.prompt for example in task.stream("test")]
    max_new_tokens = request.max_new_tokens or task.max_new_tokens
    journal = Journal(journal_of(request.output), _identity(request, prompts, max_new_tokens), "benchmark")
    keys = [
        ("turn", str(number), str(rate), system)
        for number, rate in product(range(request.rounds), request.rates)
        for system in order_of_turn(request.systems, number)
    ]
    if any(key not in journal for key in keys):
        with served(request, max_new_tokens) as systems:
            _take_turns(request, systems, prompts, journal, keys)
    turns = {key: [Outcome.from_list(values) for values in journal[key]] for key in keys}

    def rounds(rate: float, system: str) -> list[list[Outcome]]:
        return [turns["turn", str(number), str(rate), system] for number in range(request.rounds)]

    rows = [
        row_of(_shown(system), rate, rounds(rate, system), rounds(rate, request.systems[0]))
        for rate, system in product(request.rates, request.systems)
    ]
    report = LoadReport(_conditions(request, name, max_new_tokens), rows)
    request.output.parent.mkdir(parents=True, exist_ok=True)
    draw_load(request.output.with_suffix(".png"), report)
    write_atomically(request.output.with_suffix(".md"), report.to_markdown())
    write_atomically(request.output, report.to_json())
    journal.remove()
    console = make_console(width=200)
    console.print(report.to_table())
    for line in report.notes():
        console.print(line, style="dim")
    console.print(f"picture: {request.output.with_suffix('.png')}", soft_wrap=True)


def _shown(system: str) -> str:
    return "transformers serve" if system == "transformers" else system


def _take_turns(
    request: LoadRequest,
    systems: dict[str, Endpoint],
    prompts: list[str],
    journal: Journal,
    keys: list[tuple[str, str, str, str]],
) -> None:
    """Run every turn that isn't in the journal."""
    for name, endpoint in systems.items():  # warm-up
        outcomes = _play(endpoint, prompts[:WARM_UP], [0.0] * len(prompts[:WARM_UP]), request.timeout)
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if len(errors) == len(outcomes):
            raise ConfigError(f"--system {name} doesn't answer: {errors[0]}")
        missed = fallback_speedup(name, outcomes)
        if missed is not None and request.strict:
            raise ConfigError(
                f"--system is {name}: the server can't reach this speed and plans {missed:.2f}x; use a lower speed, or "
                "leave --strict out"
            )
    seed = 1000 * request.seed
    columns = (*bar_columns(), TimeRemainingColumn())
    with Progress(*columns, console=make_console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(keys) * request.requests)
        for key in keys:
            _, number, rate, system = key
            if key in journal:
                progress.advance(bar, request.requests)
                continue
            progress.update(bar, description=f"round {int(number) + 1}, {float(rate):g} requests/s, {system}")
            # The same for every system at this rate in this round.
            arrivals = poisson_arrivals(float(rate), request.requests, seed + int(number))
            drawn = drawn_prompts(prompts, request.requests, seed + int(number))
            outcomes = _play(systems[system], drawn, arrivals, request.timeout, lambda: progress.advance(bar))
            journal.add(key, [outcome.to_list() for outcome in outcomes])


def _play(
    endpoint: Endpoint, prompts: list[str], arrivals: list[float], timeout: float, advance: Any = lambda: None
) -> list[Outcome]:
    return asyncio.run(play(endpoint, prompts, arrivals, timeout, advance))


def _identity(request: LoadRequest, prompts: list[str], max_new_tokens: int) -> dict[str, Any]:
    """Everything that the times depend on, as JSON values."""
    options = {key: value for key, value in asdict(request).items() if key != "output"}
    return {
        **options,
        "rates": list(map(str, request.rates)),
        "max_new_tokens": max_new_tokens,
        "prompts": fingerprint(prompts),
        "files": {name: weights_identity(options[name]) for name in ("checkpoint", "standalone") if options[name]},
        "machine": machine_identity(_device(request)),
        "versions": versions(),
    }


def _conditions(request: LoadRequest, task: str, max_new_tokens: int) -> LoadConditions:
    own = request.checkpoint is not None
    waves = (
        f"admission in waves of {request.wave_rows} requests or after {request.wave_seconds:g} s"
        if own and request.wave_rows > 1
        else None
    )
    return LoadConditions(
        served=str(request.checkpoint or request.url),
        task=task,
        max_new_tokens=max_new_tokens,
        requests=request.requests,
        rounds=request.rounds,
        most_rows=request.rows if own else None,
        streamed=request.stream,
        waves=waves,
        date=datetime.datetime.now().isoformat(" ", "minutes"),  # minutes distinguish several runs on one day
        command=shlex.join(["python", "-m", "eval.load", *sys.argv[1:]]),
        machine=describe_machine(_device(request)),
        versions=versions(),
    )


def _device(request: LoadRequest) -> torch.device:
    """The device of servers started here. For a running server only the machine of the client is known, as CPU."""
    return resolve_device(None) if request.checkpoint is not None else torch.device("cpu")
