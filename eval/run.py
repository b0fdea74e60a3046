"""Run an evaluation and write its report, predictions and picture."""

import datetime
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data import Example, Task
from eval.card import EVALUATION, is_run, write_card
from eval.console import bar_columns, make_console
from eval.decoding import DecodedSet, batch_count, spread_over_lengths, take_turns
from eval.drawing import draw_frontier
from eval.journal import FILE_NAME, Journal
from eval.lineup import Lineup, line_up
from eval.loading import Loaded, check_same, identity, load_request
from eval.lossless import time_lossless
from eval.machine import describe_machine, versions
from eval.output import only_writer
from eval.processes import ALONE, Processes, launcher
from eval.request import Request
from eval.results import Report, Row, Timing
from eval.score.metric import BertModel, NotAvailableError, Texts
from eval.score.predictions import write_predictions
from eval.score.registry import METRICS, headline
from eval.score.scores import Scores, check_some, choose_metrics, obstacles, score
from eval.score.tokenizers import load_tokenizer
from eval.systems.base import LosslessSystem, SkipSystem, System
from eval.systems.calm import CalmSystem
from skipdecode import ConfigError

# The default number of timed prompts: enough batches for quartiles, and enough sequences at batch 1.
MIN_PROMPTS, BATCHES = 24, 8
MIN_BATCHES = 5  # for a median: fewer batches are timed several times


def evaluate(request: Request) -> Report:
    """Decode the test set with every system and write `report.json`, `report.md`, `predictions/` and `frontier.png`.

    An interrupted evaluation continues when it is started again: until the report is written, the output folder holds a
    journal of the decoded batches.

    Raises ConfigError, before anything is written, for a request that can't be met.
    """
    report = run_process(request, ALONE)
    assert report is not None  # this is the first process
    return report


def run_process(request: Request, processes: Processes) -> Report | None:
    """Run one process of an evaluation: the first one writes the outputs of `evaluate`, the others decode for it.

    Returns the report on the first process, None on the others.
    """
    with ExitStack() as stack:
        writer = only_writer(request.output, "--output") if processes.first else nullcontext()
        processes.together(lambda: stack.enter_context(writer))
        return _evaluate(request, processes)


def _evaluate(request: Request, processes: Processes) -> Report | None:
    def prepare() -> tuple[dict[str, Report], Loaded, Sequence[str]]:
        request.check_output()
        others = {name: Report.load(path) for name, path in (request.compare or {}).items()}
        loaded = load_request(request, processes)
        metrics = choose_metrics(loaded.task.metrics, request.metrics, request.bert)
        if processes.first:
            _check_metrics(request, loaded, metrics, others)
        return others, loaded, metrics

    others, loaded, metrics = processes.together(prepare)
    processes.together(lambda: check_same(loaded, processes))
    progress = make_console(stderr=True, quiet=not processes.first)
    journal, lineup = _line_up(request, loaded, processes, progress)
    results = _decode(request, loaded, lineup.by_batch[request.batch_size], journal, processes, progress)
    if not (processes.first or processes.share_model):
        return None
    # Only the first process is timed, while the others are idle; with a shared model all are.
    timed = _time(request, loaded, lineup, results[0].lengths, journal, progress)
    if not processes.first:
        return None
    scores = _score(request, loaded.task, loaded.examples, metrics, [result.predictions for result in results])
    report = _report(request, loaded, lineup.clock, results, scores, timed, processes, progress)
    _write(request.output, report, loaded.examples, results, others)
    journal.remove()
    _show(report, request.output)
    _update_card(request)
    return report


def _line_up(request: Request, loaded: Loaded, processes: Processes, console: Console) -> tuple[Journal, Lineup]:
    """The journal and the systems. The first process decides, with the journal on its disk, and informs the others."""
    decided: list[Lineup] = []

    def decide() -> Journal:
        journal = Journal(request.output / FILE_NAME, identity(request, loaded, processes))
        if len(journal):
            console.print(f"continuing the evaluation in {request.output / FILE_NAME}")
        decided.append(line_up(request, loaded, journal, console))
        return journal

    journal = processes.together(lambda: decide() if processes.first else Journal())
    entries = processes.gather(journal.entries())[0]
    if processes.first:
        return journal, decided[0]
    journal.merge(entries)
    return journal, line_up(request, loaded, journal, console)


def _decode(
    request: Request,
    loaded: Loaded,
    systems: Sequence[System],
    journal: Journal,
    processes: Processes,
    console: Console,
) -> list[DecodedSet]:
    """Decode the whole test set with every system, each sequence up to its end token."""
    turns = take_turns(
        systems,
        loaded.task,
        loaded.examples,
        loaded.prompt_ids,
        batch_size=request.batch_size,
        max_new_tokens=loaded.max_new_tokens,
        journal=journal,
        agreement=request.agreement,
        processes=processes,
    )
    title = f"{loaded.task.name} at {', '.join(system.label for system in systems)}"
    return _last(turns, title, batch_count(len(loaded.examples), request.batch_size), console)


def _check_metrics(request: Request, loaded: Loaded, metrics: Sequence[str], others: Mapping[str, Report]) -> None:
    """Raise ConfigError where no metric can be computed, or reports can't be compared."""
    computable = computable_metrics(loaded.task, loaded.examples, metrics, request.bert, request.tokenizer)
    metric = headline(dict.fromkeys(computable, 0.0)).name
    for name, other in others.items():
        if other.task != loaded.task.name:
            raise ConfigError(f"--compare {name}: that report is for the task {other.task}, not {loaded.task.name}")
        if any(metric not in row.scores for row in other.rows):
            raise ConfigError(f"--compare {name}: reports are compared by {metric}, which that report lacks")
        if other.tokenizer != request.tokenizer:
            theirs, ours = (each or "each metric's own" for each in (other.tokenizer, request.tokenizer))
            raise ConfigError(f"--compare {name}: the scores of that report use the tokenizer {theirs}, these {ours}")


def computable_metrics(
    task: Task,
    examples: Sequence[Example],
    metrics: Sequence[str],
    bert: BertModel | None = None,
    tokenizer: str | None = None,
) -> list[str]:
    """The metrics that can be computed for these examples. Raises ConfigError where none can.

    The references of all examples are checked, and one example is scored to check that dependencies are installed.
    """
    if tokenizer is not None:
        load_tokenizer(tokenizer)
    known = _known(task, examples, bert, tokenizer)
    unavailable = obstacles(Texts(predictions=(), **known), metrics)
    first = examples[:1]
    one = Texts(predictions=[e.references[0] for e in first], **_known(task, first, bert, tokenizer))
    for name in [name for name in metrics if name not in unavailable]:
        try:
            METRICS[name].compute(one)
        except NotAvailableError as error:
            unavailable[name] = str(error)
    check_some(unavailable, metrics)
    return [name for name in metrics if name not in unavailable]


def _known(task: Task, examples: Sequence[Example], bert: BertModel | None, tokenizer: str | None) -> dict[str, Any]:
    """The arguments of scoring that depend on the examples and options."""
    return {
        "references": [example.references for example in examples],
        "meanings": [example.meaning for example in examples] if all(example.meaning for example in examples) else None,
        "convention": task.convention,
        "bert": bert,
        "tokenizer": tokenizer,
    }


def _score(
    request: Request,
    task: Task,
    examples: Sequence[Example],
    metrics: Sequence[str],
    predictions: Sequence[Sequence[str]],
) -> list[Scores]:
    """The scores of each system, with p values of the difference from the first system."""
    known: Any = {
        **_known(task, examples, request.bert, request.tokenizer),
        "metrics": metrics,
        "parts": [example.part for example in examples],
    }
    first = score(predictions[0], **known)
    return [first, *(score(texts, **known, against=first) for texts in predictions[1:])]


def _time(
    request: Request,
    loaded: Loaded,
    lineup: Lineup,
    lengths: Sequence[int],
    journal: Journal,
    console: Console,
) -> dict[int, list[DecodedSet]]:
    """Time every system at each batch size on prompts drawn evenly from the test set.

    Sequence `lengths` are the same for all systems, so ending early doesn't make a system faster. A small number of
    batches is timed several times.
    """
    found: dict[int, list[DecodedSet]] = {}
    prompt_lengths = list(map(len, loaded.prompt_ids))
    for size in sorted(
        request.time_batch_sizes, key=lambda size: size != request.batch_size
    ):  # the batch size of the scores first
        drawn = spread_over_lengths(prompt_lengths, request.time_limit or max(MIN_PROMPTS, BATCHES * size))
        if len(drawn) < size:
            why = "there are no more prompts" if request.time_limit is None else "limited by --time-limit"
            console.print(f"timing at batch {size} uses a batch of {len(drawn)}: {why}")
        batches = batch_count(len(drawn), size)
        for again in range(-(-MIN_BATCHES // batches)):
            turns = take_turns(
                lineup.by_batch[size],
                loaded.task,
                [loaded.examples[n] for n in drawn],
                [loaded.prompt_ids[n] for n in drawn],
                batch_size=size,
                max_new_tokens=loaded.max_new_tokens,
                journal=journal,
                stage=f"time {again + 1}",
                lengths=[lengths[n] for n in drawn],
                first_turn=again * batches,
            )
            timed = _last(turns, f"timing at batch {size}", batches, console)
            for total, repetition in zip(found.setdefault(size, timed), timed, strict=True):
                if total is not repetition:
                    total.turns += repetition.turns
    return found


def _last(results: Iterator[list[DecodedSet]], title: str, batches: int, console: Console) -> list[DecodedSet]:
    columns = (*bar_columns(), MofNCompleteColumn(), TextColumn("batches"))
    final: list[DecodedSet] = []
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task(title, total=batches)
        for so_far in results:
            final = so_far
            progress.advance(bar)
    return final


def _report(
    request: Request,
    loaded: Loaded,
    clock: str,
    results: Sequence[DecodedSet],
    scores: Sequence[Scores],
    timed: Mapping[int, Sequence[DecodedSet]],
    processes: Processes,
    console: Console,
) -> Report:
    model = loaded.checkpoint.model
    rows = []
    for number, (result, scored) in enumerate(zip(results, scores, strict=True)):
        row = _row(result, scored, {size: (sets[number], sets[0]) for size, sets in timed.items()})
        same = sum(text == full for text, full in zip(result.predictions, results[0].predictions, strict=True))
        system = result.system
        # The 1x outputs of a reference aren't this model's, and a model shared by processes can't draft.
        drafts = row.agreement and request.reference is None and not request.tensor_parallel
        lossless = (
            time_lossless(system, loaded.prompt_ids, results[0].lengths, console)
            if drafts and isinstance(system, SkipSystem) and system.kind == "skip"
            else None
        )
        rows.append(replace(row, same_texts=same, lossless_speedup=lossless, processes=processes.count))
    return Report(
        checkpoint=request.checkpoint,
        over=request.over or loaded.config.over,
        clock=clock,
        reference=request.reference,
        task=loaded.task.name,
        examples=len(loaded.examples),
        data_split=request.split,
        batch_size=request.batch_size,
        max_new_tokens=loaded.max_new_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
        weights=results[0].system.checkpoint.weights,
        split="layers" if request.device_map is not None else "tensors" if request.tensor_parallel else None,
        prompts_cut=sum(prompt.cut for prompt in loaded.prompts),
        never_ended=sum(length >= loaded.max_new_tokens for length in results[0].lengths),
        device=str(model.device),
        date=datetime.date.today().isoformat(),
        command=request.command or shlex.join([*launcher(), "-m", "eval", *sys.argv[1:]]),
        machine=describe_machine(model.device),
        versions=versions(),
        rows=rows,
        metrics=scores[0].metrics,
        unavailable=scores[0].unavailable,
        tokenizer=request.tokenizer,
    )


def _row(decoded: DecodedSet, scores: Scores, timed: Mapping[int, tuple[DecodedSet, DecodedSet]]) -> Row:
    """The row of one system. `timed` maps batch size to the timed results of the system and of the 1x row."""
    system = decoded.system
    timings = [_timing(size, *pair) for size, pair in timed.items()]
    first, baseline = next(iter(timed.values()))
    return Row(
        label=system.label,
        system=system.kind,
        checkpoint=system.checkpoint.name,
        num_layers=system.checkpoint.num_layers,
        speedup_target=system.speedup_target,
        planned_speedup=system.planned,
        schedule=_schedule_fields(system),
        threshold=system.threshold if isinstance(system, CalmSystem) else None,
        mean_layers=decoded.mean_layers,
        layers_per_step=decoded.layers_per_step,
        scores=scores.values,
        intervals=scores.intervals,
        p_values=scores.p_values,
        agreement=decoded.agreement,
        prefill_seconds=decoded.prefill_seconds,
        decode_seconds=decoded.decode_seconds,
        decode_steps=decoded.steps,
        tokens=decoded.tokens,
        tokens_per_second=decoded.tokens_per_second,
        wall_clock_speedup=timings[0].speedup.median,
        wall_clock_quartiles=(timings[0].speedup.lower, timings[0].speedup.upper),
        whole_speedup=timings[0].whole_speedup,
        cache_bytes=decoded.cache_bytes,
        bound_by_bytes=first.bound_over(baseline),
        timings=timings,
    )


def _timing(batch_size: int, decoded: DecodedSet, baseline: DecodedSet) -> Timing:
    repetitions = len(decoded.turns) // batch_count(len(decoded.predictions), batch_size)
    return Timing(
        batch_size=batch_size,
        prompts=len(decoded.predictions),
        layers_per_step=decoded.layers_per_step,
        speedup=decoded.speed_over(baseline, "decode"),
        whole_speedup=decoded.speed_over(baseline, "all"),
        schedule=_schedule_fields(decoded.system),
        planned_speedup=decoded.system.planned,
        prefill_seconds=decoded.prefill_seconds / repetitions,
        decode_seconds=decoded.decode_seconds / repetitions,
        tokens_per_second=decoded.tokens_per_second,
        acceptance_rate=decoded.acceptance_rate,
        tokens_per_verification=decoded.tokens_per_verification,
    )


def _schedule_fields(system: System) -> dict[str, Any] | None:
    schedule = system.schedule if isinstance(system, SkipSystem | LosslessSystem) else None
    return schedule.to_dict() if schedule is not None else None


def _write(
    folder: Path,
    report: Report,
    examples: Sequence[Example],
    results: Sequence[DecodedSet],
    others: Mapping[str, Report],
) -> None:
    (folder / "predictions").mkdir(parents=True, exist_ok=True)
    for row, result in zip(report.rows, results, strict=True):
        lines = [
            {"id": e.id, "prompt": e.prompt, "prediction": text, "references": list(e.references)}
            | {name: value for name in ("meaning", "part") if (value := getattr(e, name))}
            for e, text in zip(examples, result.predictions, strict=True)
        ]
        write_predictions(folder / "predictions" / f"{row.label}.jsonl", lines)
    name = Path(report.checkpoint).resolve().name  # resolved, since "." has no name
    draw_frontier(folder / "frontier.png", {name: report, **others}, f"{report.task}: quality against measured speedup")
    report.save(folder)


def _update_card(request: Request) -> None:
    """Rewrite the model card of a finished run if the evaluation is in its own folder."""
    folder = Path(request.checkpoint)
    if is_run(folder) and request.output.resolve() == (folder / EVALUATION).resolve():
        try:
            write_card(folder, trust_remote_code=request.trust_remote_code)
        except ConfigError as error:  # the evaluation itself is complete
            make_console(stderr=True).print(f"the model card wasn't updated: {error}", soft_wrap=True)


def _show(report: Report, folder: Path) -> None:
    console = make_console(width=160)
    for table in report.to_tables():
        console.print(table)
    for line in report.notes():
        console.print(line, style="dim")
    console.print(f"picture: {folder / 'frontier.png'}", soft_wrap=True)
