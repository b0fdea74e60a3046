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
from eval.bertscore import BertModel
from eval.decoding import Decoded, decode_test_set, encode_test_set
from eval.frontier import draw_frontier
from eval.machine import describe_machine, resolve_device, versions
from eval.results import FILE_NAME, Report, headline, make_row, write_predictions
from eval.scores import Scores, choose_metrics, score
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
    metrics: tuple[str, ...] | None = None  # None: the task's
    bert: BertModel | None = None  # of BERTScore, which is computed where one is named


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
    metrics = choose_metrics(task.metrics, request.metrics, request.bert)
    model.to(device)  # type: ignore[arg-type]
    model.eval()
    reason = why_not_lean(model)
    if request.weights not in (None, "model") and reason is not None:
        raise ConfigError(f"--weights {request.weights}: this model can't decode with them: {reason}")
    weights = request.weights or (choose_weights(model) if reason is None else "model")
    examples = list(islice(task.stream("test"), request.limit))
    _check_metrics(examples[:1], metrics, request.bert, others)
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
    scores = _score({speed: result.predictions for speed, result in results.items()}, examples, metrics, request.bert)
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
        rows=[make_row(speedup, result, results[1.0], scores[speedup]) for speedup, result in results.items()],
        metrics=scores[1.0].metrics,
        unavailable=scores[1.0].unavailable,
    )
    _write(request.output, report, examples, list(results.values()), others)
    console.print(report.to_table())
    for line in report.notes():
        console.print(line, style="dim", highlight=False, markup=False)
    console.print(f"picture: {request.output / 'frontier.png'}", highlight=False, soft_wrap=True)
    return report


def _check_metrics(
    examples: Sequence[Example], metrics: Sequence[str], bert: BertModel | None, others: Mapping[str, Report]
) -> None:
    """Score one example, so that what can't be computed or compared shows before anything is decoded."""
    scores = _score({1.0: [example.references[0] for example in examples]}, examples, metrics, bert)[1.0]
    if not scores.values:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in scores.unavailable.items())
        raise ConfigError(f"none of the metrics can be computed: {reasons}")
    metric = headline(scores.values)
    for name, other in others.items():
        if any(metric not in row.scores for row in other.rows):
            raise ConfigError(f"--compare {name}: reports are compared by {metric}, and that one has none")


def _score(
    predictions: Mapping[float, Sequence[str]],
    examples: Sequence[Example],
    metrics: Sequence[str],
    bert: BertModel | None,
) -> dict[float, Scores]:
    """The scores at each speed, and of the others whether they differ from those at 1x."""
    references = [example.references for example in examples]
    meanings = [example.meaning for example in examples] if all(example.meaning for example in examples) else None
    full = score(predictions[1.0], references, metrics, meanings=meanings, bert=bert)
    return {
        speed: full if speed == 1 else score(texts, references, metrics, meanings=meanings, bert=bert, against=full)
        for speed, texts in predictions.items()
    }


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
            | ({"meaning": e.meaning} if e.meaning else {})
            for e, text in zip(examples, result.predictions, strict=True)
        ]
        write_predictions(folder / "predictions" / f"{row.speedup_target:g}x.jsonl", lines)
    name = Path(report.checkpoint).name
    draw_frontier(folder / "frontier.png", {name: report, **others}, f"{report.task}: quality against measured speed")
    report.save(folder)
