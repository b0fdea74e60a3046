"""The best schedule for a budget, found on validation data: `python -m eval.search`."""

import argparse
import datetime
import shlex
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from omegaconf import OmegaConf

from configs.files import YAML_ERRORS
from data import Example, Task, load_task
from eval.console import make_console
from eval.decoding import encode_test_set
from eval.lineup import calibrated_cost
from eval.loading import load_checkpoint
from eval.machine import describe_machine, versions
from eval.output import only_writer
from eval.search.paired import METRICS, estimate
from eval.search.picture import draw_search
from eval.search.plan import Plan, SearchRequest, find_plan
from eval.search.report import WINNER_FILE, SearchReport, choose_winner, make_rows, warning
from eval.search.space import Budget, LayerCount, Space, choose_schedules
from eval.search.trials import (
    FILE_NAME,
    FULL_DEPTH,
    Batch,
    TrialLog,
    Validation,
    run_trials,
    rung_ends,
    statistics_of,
)
from skipdecode import ConfigError, CostModel, SkipSchedule
from skipdecode.checkpoint import SkipConfig
from skipdecode.command import run_command
from skipdecode.cost import Cost
from skipdecode.device import resolve_device
from skipdecode.errors import first_line
from skipdecode.lean import choose_weights, why_not_lean
from skipdecode.projections import Weights
from skipdecode.schedule import Decay, Placement

PICTURE = "search.png"
HORIZONS = (0.5, 0.75, 1.0, 1.5, 2.0)  # of the default schedule's, where none are named


def main(arguments: Sequence[str] | None = None) -> int:
    """Search. Returns the exit status, as `run_command` does."""
    options = vars(_parser().parse_args(arguments))
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
    return run_command(lambda: _search(values), left=lambda: "the same command goes on")


def _search(values: dict[str, Any]) -> None:
    search(SearchRequest(**values))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.search",
        description="Find the best max, min, warm-up, decay and horizon of a skip schedule for a budget, by decoding "
        "validation data, never the test set. The schedule that the checkpoint would use by itself is the first trial, "
        "and wins unless another is better beyond noise. After a quarter and a half of the prompts (where that is at "
        "least 64 or a batch) the worse half of the schedules leaves. All schedules take turns on each batch with each "
        "other and with full depth, so speeds are measured side by side and nothing is decoded for the clock alone. "
        "Writes winner.json (for schedule.files of a recipe and for python -m eval --schedule), search.json, "
        "search.md, search.png, and trials.jsonl batch by batch: started again with the same arguments, a search that "
        "was cut off goes on.",
        epilog="example: python -m eval.search --checkpoint outputs/e2e-tiny --data-dir E2E --speedup 3 --output found",
    )
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="a finished run's folder, or a Hub name")
    add("--output", required=True, type=Path, metavar="DIR", help="a folder: new, or of the same search")
    add("--speedup", type=float, metavar="X", help="the budget: a target for the wall clock, as in python -m eval")
    add("--mean-layers", type=float, metavar="K", help="or: layers per generated token over the default's horizon")
    add("--trials", type=int, default=20, metavar="N", help="schedules, the default among them (default 20)")
    add("--task", help="default: what the checkpoint was trained on")
    add("--data-dir", metavar="DIR", help="the task's local folder; default: the Hub, or built in")
    add(
        "--task-option",
        dest="task_options",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="options of the task beside or in place of those that the checkpoint was trained with, such as holdout=60",
    )
    add("--limit", type=int, metavar="N", help="only the first N prompts of the validation data")
    add("--batch-size", type=int, default=32, metavar="B", help="prompts decoded together (default 32)")
    add("--metric", default="bleu", choices=METRICS, help="what is best (default bleu)")
    decays = list(SearchRequest.decays)
    add("--decays", nargs="+", choices=get_args(Decay), default=decays, help=f"to try; default: {' '.join(decays)}")
    add("--warmup", nargs="+", type=int, default=list(SearchRequest.warmup), metavar="W", help="to try; default: 1 2 3")
    add("--horizons", nargs="+", type=int, metavar="H", help="to try; default: half to twice the default schedule's")
    add("--placements", nargs="+", choices=get_args(Placement), default=["top"], help="to try; default: top")
    add("--calibrate", action="store_true", help="predict speeds by steps that are timed here first")
    add("--max-new-tokens", type=int, metavar="N", help="default: the task's")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="default: the checkpoint's")
    add("--weights", choices=get_args(Weights), help="what decode steps compute with, as in skip_generate")
    add("--trust-remote-code", action="store_true", help="run Python code that the checkpoint brings")
    add("--device", help="cpu, cuda, cuda:1, …; default: cuda where there is one")
    add("--seed", type=int, default=0, help="of schedules drawn, the order of prompts and the bootstrap (default 0)")
    return parser


def search(request: SearchRequest) -> SearchReport:
    """Try schedules that reach a budget on validation data, and write the winner and how it was found.

    Raises ConfigError, before anything is written, for a request that can't be met.
    """
    with only_writer(request.output, "--output"):
        return _try_schedules(request)


def _try_schedules(request: SearchRequest) -> SearchReport:
    console = make_console(width=200)
    plan = find_plan(request)
    remembered = SkipConfig.load(request.checkpoint)
    name, options = _task_named(request, remembered)
    task, examples = _examples(request, name, options)
    data = _load(request, remembered, task, examples)
    checksum = zlib.crc32(repr([(e.prompt, e.references) for e in examples]).encode())
    if plan is not None:
        plan.check_data(checksum, request.output)
    trained_on = _trained_on(request, remembered, name, options, examples)
    if trained_on:
        make_console(stderr=True).print(warning(trained_on, len(examples)), style="bold red")
    if plan is None:
        plan = _plan(request, remembered or SkipConfig(solver={"horizon": task.horizon}), data, checksum)
        plan.save(request.output)
    batches = run_trials(plan.to_schedules(), data, TrialLog(request.output / FILE_NAME), request.seed)
    report = _report(request, plan, data, options, batches, trained_on)
    draw_search(request.output / PICTURE, report)
    report.save(request.output)
    console.print(report.to_table())
    console.print(report.verdict(), style="bold")
    for line in report.notes():
        console.print(line, style="dim")
    console.print(f"winner: {request.output / WINNER_FILE}", soft_wrap=True)
    console.print(f"picture: {request.output / PICTURE}", soft_wrap=True)
    return report


def _report(
    request: SearchRequest,
    plan: Plan,
    data: Validation,
    options: Mapping[str, Any],
    batches: Sequence[Batch],
    trained_on: int,
) -> SearchReport:
    """What the batches say."""
    rows = make_rows(plan.to_schedules(), plan.predicted, batches, request.metric)
    return SearchReport(
        checkpoint=request.checkpoint,
        task=data.task.name,
        task_options=dict(options),
        metric=request.metric,
        target=request.target,
        steps=plan.steps,
        prompts=len(data.prompts),
        rungs=rung_ends(len(data.prompts), request.batch_size),
        trained_on=trained_on,
        asked_for=request.trials,
        batch_size=request.batch_size,
        max_new_tokens=data.max_new_tokens,
        dtype=str(data.model.dtype).removeprefix("torch."),
        weights=data.weights,
        calibrated=request.calibrate,
        seed=request.seed,
        date=datetime.date.today().isoformat(),
        command=shlex.join(["python", "-m", "eval.search", *sys.argv[1:]]),
        machine=describe_machine(data.model.device),
        versions=versions(),
        full_depth=estimate(request.metric, statistics_of(batches, FULL_DEPTH)),
        winner=choose_winner(rows),
        trials=rows,
    )


def _task_named(request: SearchRequest, config: SkipConfig | None) -> tuple[str, Mapping[str, Any]]:
    """The task's name and options: those that the checkpoint remembers of it, changed by those asked for."""
    name = request.task or (config.task.get("name") if config is not None else None)
    if name is None:
        raise ConfigError("--task is missing: the checkpoint doesn't say what it was trained on")
    for pair in request.task_options:
        if not all(part.strip() for part in pair.partition("=")):
            raise ConfigError(f"--task-option {pair!r}: expected key=value, such as holdout=60")
    try:
        changes = OmegaConf.to_container(OmegaConf.from_dotlist(list(request.task_options)))
    except YAML_ERRORS as error:
        raise ConfigError(f"--task-option {' '.join(request.task_options)}: {first_line(error)}") from error
    assert isinstance(changes, dict)
    return name, {**_remembered(config, name).get("options", {}), **{str(key): value for key, value in changes.items()}}


def _remembered(config: SkipConfig | None, name: str) -> Mapping[str, Any]:
    """What the checkpoint remembers of a task; nothing where it was trained on another."""
    return config.task if config is not None and config.task.get("name") == name else {}


def _examples(request: SearchRequest, name: str, options: Mapping[str, Any]) -> tuple[Task, list[Example]]:
    """The task and its validation data, as much of it as is asked for."""
    task = load_task(name, path=request.data_dir, **options)
    try:
        examples = list(islice(task.stream("validation"), request.limit))
    except ConfigError as error:
        raise ConfigError(f"no validation data: {error}; a search takes options as --task-option KEY=VALUE") from error
    if not examples:
        raise ConfigError(f"task {name!r} has no validation data here: its validation split is empty")
    return task, examples


def _trained_on(
    request: SearchRequest,
    config: SkipConfig | None,
    name: str,
    options: Mapping[str, Any],
    examples: Sequence[Example],
) -> int:
    """How many of the examples the checkpoint was trained on.

    With the options that it was trained with none, by what a validation split is; with others, by looking.
    """
    trained_with = _remembered(config, name).get("options")
    if trained_with is None or dict(trained_with) == dict(options):
        return 0
    wanted = {example.references for example in examples}
    seen = {e.references for e in load_task(name, path=request.data_dir, **trained_with).stream("train")} & wanted
    return sum(example.references in seen for example in examples)


def _load(request: SearchRequest, config: SkipConfig | None, task: Task, examples: Sequence[Example]) -> Validation:
    """The checkpoint, ready to decode the examples."""
    device = resolve_device(request.device)
    checkpoint = load_checkpoint(request.checkpoint, request.dtype, device, trust_remote_code=request.trust_remote_code)
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    reason = why_not_lean(model)
    if request.weights not in (None, "model") and reason is not None:
        raise ConfigError(f"--weights {request.weights}: this model can't decode with them: {reason}")
    max_new_tokens = request.max_new_tokens or task.max_new_tokens
    longest = _remembered(config, task.name).get("max_prompt_tokens", task.max_prompt_tokens)
    encoded = encode_test_set(model, tokenizer, examples, max_prompt_tokens=longest, max_new_tokens=max_new_tokens)
    return Validation(
        model=model,
        tokenizer=tokenizer,
        task=task,
        examples=examples,
        prompts=[prompt.ids for prompt in encoded],
        batch_size=request.batch_size,
        max_new_tokens=max_new_tokens,
        weights=request.weights or (choose_weights(model) if reason is None else "model"),
        metric=request.metric,
    )


def _plan(request: SearchRequest, config: SkipConfig, data: Validation, checksum: int) -> Plan:
    """The default schedule of the budget, and others that reach it."""
    cost: Cost = CostModel.of(data.model).at(**config.conditions)
    depth = cost.num_layers
    if request.mean_layers is not None:
        if request.mean_layers >= depth:
            raise ConfigError(f"--mean-layers is {request.mean_layers:g}: it must be below the model's {depth} layers")
        least = config.solver.get("warmup_layers", 1)
        if request.mean_layers < least:
            raise ConfigError(f"--mean-layers is {request.mean_layers:g}: the default schedule warms up {least} layers")
        cost, speedup = LayerCount(depth), depth / request.mean_layers
        config = replace(config, schedules={})  # those of the training were solved for a clock
    else:
        assert request.speedup is not None  # one of the two is given
        speedup = request.speedup
        if request.calibrate:
            config = replace(config, schedules={})  # those of the training were solved for another clock
            cost = calibrated_cost(data.model, data.prompts, request.batch_size, data.weights)
    default = config.schedule_for(cost, speedup)
    budget = Budget(cost, speedup, steps=default.horizon, prompt=default.prompt)
    horizons = request.horizons or tuple(dict.fromkeys(max(1, round(share * default.horizon)) for share in HORIZONS))
    space = Space(request.warmup, request.decays, horizons, request.placements)
    schedules: list[SkipSchedule] = choose_schedules(
        budget, space, default, trials=request.trials, tokens=data.max_new_tokens, seed=request.seed
    )
    predicted = [budget.predicted(schedule) for schedule in schedules]
    return Plan(request.to_dict(), checksum, budget.steps, [s.to_dict() for s in schedules], predicted)
