"""The dry run: everything is built, the heaviest step and a few others are run, and nothing is saved."""

import copy
import datetime
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from data.rows import row_lengths
from eval.console import make_console
from skipdecode.training.sampling import Draw, ScheduleSampler
from train.build import build_task
from train.distributed import is_first_process, whole_weights
from train.dry_run.duration import ROUNDS, choose_timed, estimate_seconds, plan_steps, validation_work
from train.dry_run.memory import MemoryEstimate, estimate_memory, heaviest_step
from train.dry_run.simulation import SimulatedStep
from train.evaluation import check_evaluation
from train.output import check_folder
from train.prepare import describe_schedules, make_arguments, make_trainer, prepare, warn_left_out
from train.publish.parcel import check_publish
from train.recipe import Recipe

GIB = 2**30


@dataclass(frozen=True)
class DryRun:
    """The results of a dry run.

    Attributes:
        simulated: the heaviest step, simulated on tensors without data.
        rows: number of training rows.
        rows_a_step: rows of one optimiser step, over all processes.
        steps: number of optimiser steps.
        schedules: one line for each schedule that may be sampled.
        prompt_columns: prompt length of the largest batch, in tokens.
        new_tokens: completion length of the largest batch, in tokens.
        estimate: the estimated memory for the largest batch.
        measured_peak: peak memory of a CUDA device, in bytes; None on a CPU.
        seconds_a_step: measured time of the heaviest step, after a warm-up step.
        tokens_per_second: tokens of completions per second in that step.
        seconds: minimum and maximum expected time of all training steps, without checkpoints.
    """

    simulated: SimulatedStep
    rows: int
    rows_a_step: int
    steps: int
    schedules: tuple[str, ...]
    prompt_columns: int
    new_tokens: int
    estimate: MemoryEstimate
    measured_peak: int | None
    seconds_a_step: float
    tokens_per_second: float
    seconds: tuple[float, float]


def dry_run(recipe: Recipe) -> DryRun:
    """Build everything in a recipe and run its heaviest step and a few of its other steps, in a temporary folder.

    Raises ConfigError as `train.run.run` does.
    """
    check_publish(recipe)
    folder = Path(str(recipe.output.dir))
    check_folder(folder, recipe)
    recipe = recipe.model_copy(update={"tracking": recipe.tracking.model_copy(update={"wandb": "off"})})
    task = build_task(recipe)
    prepared = prepare(recipe, task, make_arguments(recipe, folder), measure_order=False)
    check_evaluation(recipe, task, prepared)
    warn_left_out(make_console(stderr=True, quiet=not is_first_process()), prepared)
    rows = prepared.encoded.rows
    prompts, completions = row_lengths(rows)
    batch = _longest_rows(prompts, completions, recipe.train.per_device_batch_size)
    prompt_columns, new_tokens = int(prompts[batch].max()), int(completions[batch].max())
    with whole_weights(prepared.arguments):  # the simulated model must not be sharded
        sampler, simulated = heaviest_step(
            recipe, prepared.model.config, prepared.sampler, prompt_columns=prompt_columns, new_tokens=new_tokens
        )
    processes = prepared.arguments.world_size
    copies = recipe.train.gradient_accumulation_steps * processes
    timed = choose_timed(plan_steps(prepared, bool(recipe.optim.distillation)), prepared.steps)
    heaviest = (batch * copies, sampler.at(0))
    steps = [heaviest, heaviest, *((each.step.rows, each.step.draws) for each in timed * ROUNDS)]  # the first warms up
    watch = StepWatch()
    with tempfile.TemporaryDirectory() as elsewhere:
        rehearsal = replace(
            prepared,
            encoded=replace(prepared.encoded, rows=rows.select([row for taken, _ in steps for row in taken])),
            validation=None,
            sampler=FixedDraws(**vars(prepared.sampler), draws=tuple(draws for _, draws in steps)),
            arguments=_rehearsal_arguments(prepared.arguments, elsewhere, len(steps)),
        )
        trainer = make_trainer(recipe, rehearsal, callbacks=[watch])
        trainer.train()
    _, heaviest_seconds, *seconds = watch.seconds
    return DryRun(
        simulated=simulated,
        rows=len(rows),
        rows_a_step=prepared.rows_a_step,
        steps=prepared.steps,
        schedules=tuple(describe_schedules(prepared)),
        prompt_columns=prompt_columns,
        new_tokens=new_tokens,
        estimate=estimate_memory(recipe, simulated, processes),
        measured_peak=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        seconds_a_step=heaviest_seconds,
        tokens_per_second=copies * int(completions[batch].sum()) / heaviest_seconds,
        seconds=estimate_seconds(
            timed, [seconds[number :: len(timed)] for number in range(len(timed))], validation_work(prepared)
        ),
    )


def _longest_rows(prompts: "np.ndarray[Any, Any]", completions: "np.ndarray[Any, Any]", count: int) -> list[int]:
    """Indices of the longest rows, with the longest prompt and the longest completion; repeated if rows are too few."""
    longest = list(map(int, (-prompts - completions).argsort()))
    chosen = longest if count == 1 else [int(prompts.argmax()), int(completions.argmax()), *longest]
    return list(islice(cycle(dict.fromkeys(chosen)), count))


def _rehearsal_arguments(arguments: TrainingArguments, folder: str, steps: int) -> TrainingArguments:
    """A copy of the arguments that runs `steps` steps on the rows in their order, without validation or checkpoints."""
    changed = copy.copy(arguments)  # new arguments would make DeepSpeed read its config again
    changed.output_dir = folder
    changed.max_steps = steps
    changed.save_strategy = SaveStrategy.NO
    changed.eval_strategy = IntervalStrategy.NO
    changed.load_best_model_at_end = False
    changed.logging_strategy = IntervalStrategy.NO
    changed.train_sampling_strategy = "sequential"
    changed.report_to = []
    return changed


@dataclass(frozen=True)
class FixedDraws(ScheduleSampler):
    """Returns the given draws for each step."""

    draws: tuple[tuple[Draw, ...], ...] = ()

    def at(self, step: int) -> tuple[Draw, ...]:
        return self.draws[step]


class StepWatch(TrainerCallback):
    """A callback that times each optimiser step, including the loading and collating of its rows."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._start = _now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        end = _now()
        self.seconds.append(end - self._start)
        self._start = end


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def print_dry_run(found: DryRun, name: str) -> None:
    """Print the results, in the first process only."""
    if not is_first_process():
        return
    estimate, measured, (low, high) = found.estimate, found.measured_peak, found.seconds
    lines = [
        ("parameters", f"{found.simulated.parameters:,}, of which {found.simulated.trainable:,} are trained"),
        *([("  in 4 bits", f"{found.simulated.four_bit:,}")] if found.simulated.four_bit else []),
        ("rows", f"{found.rows:,}"),
        ("effective batch size", f"{found.rows_a_step} rows"),
        ("steps", f"{found.steps:,}"),
        *(("schedule", line) for line in found.schedules),
        ("largest batch", f"{found.prompt_columns} prompt tokens, {found.new_tokens} completion tokens per row"),
        ("memory, estimated", f"{estimate.total / GIB:.2f} GiB per device at its peak"),
        ("  weights", f"{estimate.weights / GIB:.2f} GiB"),
        ("  optimiser", f"{estimate.optimiser / GIB:.2f} GiB"),
        ("  gradients, activations", f"{estimate.step / GIB:.2f} GiB"),
        *([("  on the host", f"{estimate.host / GIB:.2f} GiB")] if estimate.host else []),
        *([] if measured is None else [("memory, measured", f"{measured / GIB:.2f} GiB")]),
        (
            "seconds per step",
            f"{found.seconds_a_step:.3f} at most; {low / found.steps:.3f} to {high / found.steps:.3f} on average",
        ),
        ("tokens per second", f"{found.tokens_per_second:,.0f} of completions"),
        ("training", f"{_clock(low)} to {_clock(high)} (h:mm:ss), without checkpoints and evaluation"),
    ]
    width = max(len(label) for label, _ in lines)
    print(f"{name}: dry run, nothing was saved")
    for label, value in lines:
        print(f"{label:<{width}}  {value}")


def _clock(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    return str(datetime.timedelta(seconds=round(seconds)))
