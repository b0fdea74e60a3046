"""An evaluation, from a checkpoint to report, predictions and picture."""

import datetime
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data import Example, Task, load_task
from eval.decoding import Decoded, decode_test_set, encode_test_set
from eval.frontier import draw_frontier
from eval.machine import describe_machine, resolve_device, versions
from eval.results import FILE_NAME, Report, make_row, write_predictions
from eval.scores import score
from skipdecode import ConfigError, CostModel, SkipSchedule, measure_cost
from skipdecode.checkpoint import SkipConfig
from skipdecode.cost import Cost
from skipdecode.lean import choose_weights, why_not_lean
from skipdecode.loading import load_model, load_tokenizer
from skipdecode.projections import Weights


@dataclass(frozen=True)
class Request:
    """What `python -m eval` was asked for."""

    checkpoint: str
    output: Path
    speedups: tuple[float, ...]
    schedules: tuple[str, ...] = ()  # files, decoded beside the targets
    task: str | None = None
    data_dir: str | None = None
    limit: int | None = None
    batch_size: int = 32
    max_new_tokens: int | None = None
    dtype: str | None = None
    weights: Weights | None = None
    calibrate: bool = False
    device: str | None = None
    compare: Mapping[str, Path] | None = None


def evaluate(request: Request) -> Report:
    """Decode the test set at every speed and write `report.json`, `report.md`, `predictions/` and `frontier.png`.

    Raises ConfigError, before anything is written, for a request that can't be met.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a file or a pipe has no width to fit the table into
    _check(request)
    others = {name: Report.load(path) for name, path in (request.compare or {}).items()}
    device = resolve_device(request.device)
    model = load_model(request.checkpoint, dtype=getattr(torch, request.dtype) if request.dtype else None)
    tokenizer = load_tokenizer(request.checkpoint)
    config = SkipConfig.load(request.checkpoint)
    task = _task(request, config)
    model.to(device)  # type: ignore[arg-type]
    model.eval()
    reason = why_not_lean(model)
    if request.weights not in (None, "model") and reason is not None:
        raise ConfigError(f"--weights {request.weights}: this model can't decode with them: {reason}")
    weights = request.weights or (choose_weights(model) if reason is None else "model")
    examples = list(islice(task.stream("test"), request.limit))
    max_new_tokens = request.max_new_tokens or task.max_new_tokens
    max_prompt_tokens = _trained_on(task.name, config).get("max_prompt_tokens", task.max_prompt_tokens)
    encoded = encode_test_set(
        model, tokenizer, examples, max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens
    )
    prompts = [prompt.ids for prompt in encoded]
    config = config or SkipConfig(solver={"horizon": task.horizon})
    cost: Cost = CostModel.of(model)
    if request.calibrate:
        config = replace(config, schedules={})  # those of the training were solved for another clock
        cost = measure_cost(
            model,
            batch_size=min(request.batch_size, len(examples)),
            prompt_length=round(statistics.median(map(len, prompts))),
            weights=weights,
        )
    speeds = _speeds(request, config, cost)
    progress = decode_test_set(
        model,
        tokenizer,
        task,
        examples,
        prompts,
        list(speeds.values()),
        batch_size=request.batch_size,
        max_new_tokens=max_new_tokens,
        weights=weights,
    )
    title = f"{task.name} at {', '.join(f'{s:g}x' for s in speeds)}"
    results = dict(zip(speeds, _last(progress, title, -(-len(examples) // request.batch_size)), strict=True))
    references = [example.references for example in examples]
    report = Report(
        checkpoint=request.checkpoint,
        task=task.name,
        examples=len(examples),
        batch_size=request.batch_size,
        max_new_tokens=max_new_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
        weights=weights,
        prompts_cut=sum(prompt.cut for prompt in encoded),
        device=str(device),
        date=datetime.date.today().isoformat(),
        command=shlex.join(["python", "-m", "eval", *sys.argv[1:]]),
        machine=describe_machine(device),
        versions=versions(),
        rows=[
            make_row(speedup, result, results[1.0], score(result.predictions, references))
            for speedup, result in results.items()
        ],
    )
    _write(request.output, report, examples, list(results.values()), others)
    console.print(report.to_table())
    for line in report.notes():
        console.print(line, style="dim", highlight=False, markup=False)
    console.print(f"picture: {request.output / 'frontier.png'}", highlight=False, soft_wrap=True)
    return report


def _speeds(request: Request, config: SkipConfig, cost: Cost) -> dict[float, SkipSchedule]:
    """Target speedup -> schedule, for every row; 1x is among them, since the others are measured against it."""
    speeds = {speedup: config.schedule_for(cost, speedup) for speedup in request.speedups}
    if 1.0 not in speeds:
        speeds = {1.0: config.schedule_for(cost, 1.0), **speeds}
    for file in request.schedules:
        schedule = SkipSchedule.load(file)
        predicted = round(cost.speedup(schedule), 2)
        if predicted in speeds:
            raise ConfigError(f"--schedule {file} is predicted {predicted:g}x, which is a row already: leave one out")
        speeds[predicted] = schedule
    return speeds


def _last(results: Iterator[list[Decoded]], title: str, batches: int) -> list[Decoded]:
    """The final results, with a progress bar on the way."""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TextColumn("batches"))
    final: list[Decoded] = []
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task(title, total=batches)
        for so_far in results:
            final = so_far
            progress.advance(bar)
    return final


def _check(request: Request) -> None:
    for name, value in (("--limit", request.limit), ("--max-new-tokens", request.max_new_tokens)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}: it must be at least 1")
    if request.batch_size < 1:
        raise ConfigError(f"--batch-size is {request.batch_size}: it must be at least 1")
    if not request.speedups or min(request.speedups) < 1 or len(set(request.speedups)) != len(request.speedups):
        raise ConfigError(f"--speedup is {list(request.speedups)}: name different targets of 1 or more, such as 1 2 4")
    if request.output.is_file():
        raise ConfigError(f"--output {request.output} is a file: name a folder")
    if (request.output / FILE_NAME).exists():
        raise ConfigError(f"--output {request.output} already holds a report: name another folder, or remove it")


def _task(request: Request, config: SkipConfig | None) -> Task:
    """The task asked for, with the options that the checkpoint was trained with where it is the same task."""
    name = request.task or (config.task.get("name") if config is not None else None)
    if name is None:
        raise ConfigError("--task is missing: the checkpoint doesn't say what it was trained on")
    return load_task(name, path=request.data_dir, **_trained_on(name, config).get("options", {}))


def _trained_on(name: str, config: SkipConfig | None) -> Mapping[str, Any]:
    """What the checkpoint remembers of a task; nothing where it was trained on another."""
    return config.task if config is not None and config.task.get("name") == name else {}


def _write(
    folder: Path,
    report: Report,
    examples: Sequence[Example],
    results: Sequence[Decoded],
    others: Mapping[str, Report],
) -> None:
    (folder / "predictions").mkdir(parents=True, exist_ok=True)
    for row, result in zip(report.rows, results, strict=True):
        lines = [
            {"id": e.id, "prompt": e.prompt, "prediction": text, "references": list(e.references)}
            for e, text in zip(examples, result.predictions, strict=True)
        ]
        write_predictions(folder / "predictions" / f"{row.speedup_target:g}x.jsonl", lines)
    name = Path(report.checkpoint).name
    draw_frontier(folder / "frontier.png", {name: report, **others}, f"{report.task}: quality against measured speed")
    report.save(folder)
