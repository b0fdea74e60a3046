"""Run a search and write its report and winner."""

import datetime
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from data import Example, Task, load_task
from eval.console import make_console
from eval.decoding import encode_test_set
from eval.journal import Journal
from eval.lineup import common_weights, profile_of, prompt_lengths_by_batch
from eval.loading import (
    checkpoint_identity,
    fingerprint,
    load_checkpoint,
    remembered,
    task_options,
    validation_examples,
)
from eval.machine import describe_machine, machine_identity, versions
from eval.output import LOCK, only_writer
from eval.run import computable_metrics
from eval.score.metric import Texts
from eval.score.registry import metric_named
from eval.search.paired import estimate
from eval.search.picture import draw_search
from eval.search.report import WINNER_FILE, SearchReport, choose_winner, make_rows, warning
from eval.search.request import SearchRequest
from eval.search.space import Budget, LayerCount, Space, choose_schedules
from eval.search.trials import FULL_DEPTH, Validation, run_trials, rung_ends, statistics_of
from skipdecode import ConfigError, SkipSchedule
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.cli.device import resolve_device
from skipdecode.schedule.cost import Cost

PICTURE, TRIALS = "search.png", "trials.jsonl"
HORIZONS = (0.5, 0.75, 1.0, 1.5, 2.0)  # default horizons, as factors of that of the default schedule
_PLAN, _WEIGHTS = ("plan",), ("weights",)


def search(request: SearchRequest) -> SearchReport:
    """Try schedules that reach a budget on validation data, and write the winner and a report.

    Raises ConfigError, before anything is written, for a request that can't be met.
    """
    with only_writer(request.output, "--output"):
        report = _try_schedules(request)
    console = make_console(width=200)
    console.print(report.to_table())
    console.print(report.verdict(), style="bold")
    for line in report.notes():
        console.print(line, style="dim")
    console.print(f"winner: {request.output / WINNER_FILE}", soft_wrap=True)
    console.print(f"picture: {request.output / PICTURE}", soft_wrap=True)
    return report


def _try_schedules(request: SearchRequest) -> SearchReport:
    _check_folder(request.output)
    config = None if request.gguf_file is not None else SkipConfig.load(request.checkpoint)
    name, options = task_options(request.task, config, request.task_options)
    task = load_task(name, path=request.data_dir, **options)
    examples = validation_examples(task, request.limit, "options of the task are given as --task-option KEY=VALUE")
    if len(examples) < 2:
        raise ConfigError(f"the validation data of {task.name} has a single prompt: a search needs at least 2")
    computable_metrics(task, examples, [request.metric], tokenizer=request.tokenizer)
    data = _load(request, config, task, examples)
    journal = Journal(request.output / TRIALS, _identity(request, data), "search")
    trained_on = _trained_on(request, config, name, options, examples)
    if trained_on:
        make_console(stderr=True).print(warning(trained_on, len(examples)), style="bold red")
    if _PLAN not in journal:
        known = config or SkipConfig(solver={"horizon": task.horizon})
        budget, schedules, planned = _choose(request, known, data, make_console(stderr=True))
        predicted = [budget.predicted(schedule) for schedule in schedules]
        steps = budget.steps if budget.cost.expected_steps is None else None
        journal.add(_PLAN, [steps, [schedule.to_dict() for schedule in schedules], predicted, planned])
    steps, fields, predicted, planned = journal[_PLAN]
    # The default depends on free memory, which may differ when the search continues.
    weights = journal.get_or_add(_WEIGHTS, lambda: data.checkpoint.weights)
    data = replace(data, checkpoint=replace(data.checkpoint, weights=weights))
    schedules = [SkipSchedule.from_dict(values) for values in fields]
    batches = run_trials(schedules, data, journal, request.seed)
    rows = make_rows(schedules, predicted, batches, request.metric)
    model = data.checkpoint.model
    words = Texts((), [e.references for e in examples], convention=task.convention, tokenizer=request.tokenizer)
    report = SearchReport(
        checkpoint=request.checkpoint,
        task=task.name,
        task_options=options,
        metric=request.metric,
        computed=metric_named(request.metric).describe(words),
        target=request.target,
        steps=steps,
        prompts=len(examples),
        rungs=rung_ends(len(examples), request.batch_size),
        trained_on=trained_on,
        asked_for=request.trials,
        batch_size=request.batch_size,
        max_new_tokens=data.max_new_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
        weights=data.checkpoint.weights,
        calibrated=request.calibrate,
        seed=request.seed,
        date=datetime.date.today().isoformat(),
        command=shlex.join(["python", "-m", "eval.search", *sys.argv[1:]]),
        machine=describe_machine(model.device),
        versions=versions(),
        full_depth=estimate(request.metric, statistics_of(batches, FULL_DEPTH)),
        winner=choose_winner(rows),
        trials=rows,
        planned_speedup=planned,
    )
    draw_search(request.output / PICTURE, report)
    report.save(request.output)
    return report


def _identity(request: SearchRequest, data: Validation) -> dict[str, Any]:
    """Everything that the results depend on, as JSON values."""
    return {
        **request.to_dict(),
        "validation data": fingerprint([[e.prompt, e.references] for e in data.examples]),
        "files": checkpoint_identity(data.checkpoint),
        "machine": machine_identity(data.checkpoint.model.device),
        "versions": versions(),
    }


def _check_folder(folder: Path) -> None:
    """Raise ConfigError where the output folder holds files but no search."""
    files = {file.name for file in folder.iterdir()} - {LOCK} if folder.exists() else set()
    if files and TRIALS not in files:
        raise ConfigError(
            f"--output {folder} holds files that don't belong to a search: name another folder, or remove it"
        )


def _trained_on(
    request: SearchRequest,
    config: SkipConfig | None,
    name: str,
    options: Mapping[str, Any],
    examples: Sequence[Example],
) -> int:
    """Count the examples that the checkpoint was trained on.

    With the task options of the training there are none, since the splits are disjoint; with others the validation
    split is compared with the training split.
    """
    trained_with = remembered(config, name).get("options")
    if trained_with is None or dict(trained_with) == dict(options):
        return 0
    wanted = {example.references for example in examples}
    seen = {e.references for e in load_task(name, path=request.data_dir, **trained_with).stream("train")} & wanted
    return sum(example.references in seen for example in examples)


def _load(request: SearchRequest, config: SkipConfig | None, task: Task, examples: Sequence[Example]) -> Validation:
    device = resolve_device(request.device)
    options: dict[str, Any] = {"gguf_file": request.gguf_file, "trust_remote_code": request.trust_remote_code}
    checkpoint = load_checkpoint(request.checkpoint, request.dtype, device, **options)
    checkpoint = replace(checkpoint, weights=common_weights(request.weights, [checkpoint]))
    max_new_tokens = request.max_new_tokens or task.max_new_tokens
    longest = remembered(config, task.name).get("max_prompt_tokens", task.max_prompt_tokens)
    limits = {"max_prompt_tokens": longest, "max_new_tokens": max_new_tokens}
    encoded = encode_test_set(checkpoint.model, checkpoint.tokenizer, examples, **limits)
    return Validation(
        checkpoint=checkpoint,
        task=task,
        examples=examples,
        prompts=[prompt.ids for prompt in encoded],
        batch_size=request.batch_size,
        max_new_tokens=max_new_tokens,
        metric=request.metric,
        tokenizer=request.tokenizer,
    )


def _choose(
    request: SearchRequest, config: SkipConfig, data: Validation, console: Console
) -> tuple[Budget, list[SkipSchedule], float | None]:
    """The budget, the schedules that reach it (default first), and the planned speedup of an unreachable target."""
    depth, profile = data.checkpoint.num_layers, None
    if request.mean_layers is not None:
        if request.mean_layers >= depth:
            raise ConfigError(f"--mean-layers is {request.mean_layers:g}: it must be below the model's {depth} layers")
        warmup = config.solver.get("warmup_layers", 1)
        if request.mean_layers < warmup:
            raise ConfigError(
                f"--mean-layers is {request.mean_layers:g}: it must be at least the {warmup} warm-up layers of the "
                "default schedule"
            )
        cost: Cost = LayerCount(depth)
        speedup = depth / request.mean_layers
        config = replace(config, schedules={})  # those of the training were solved for a speedup
    else:
        assert request.speedup is not None  # by the checks of SearchRequest
        speedup = request.speedup
        setting = (data.checkpoint, config, (request.batch_size,), data.prompts)
        profile = profile_of(*setting, console, calibrate=request.calibrate)
        prompts = prompt_lengths_by_batch(data.prompts, request.batch_size)
        cost = config.cost_for(data.checkpoint.cost, prompts=prompts, profile=profile)
    plan = config.plan_for(cost, speedup, over="decode", profile=profile, strict=request.strict)
    default = plan.schedule
    steps = config.horizon or default.horizon  # the horizon of the default may be longer, to reach the target
    budget = Budget(cost, speedup, steps=steps, prompt=default.prompt, prompt_stop=default.prompt_stop)
    if not plan.reached:
        console.print(f"warning: {plan.warning()}", soft_wrap=True)
        budget = replace(budget, speedup=budget.predicted(default))
    horizons = request.horizons or tuple(dict.fromkeys(max(1, round(share * steps)) for share in HORIZONS))
    space = Space(request.warmup, request.decays, horizons, request.placements)
    schedules = choose_schedules(
        budget, space, default, trials=request.trials, tokens=data.max_new_tokens, seed=request.seed
    )
    return budget, schedules, plan.fallback_speedup
