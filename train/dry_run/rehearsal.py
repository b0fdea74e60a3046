"""A rehearsal of a run: everything is built, its heaviest step and some others are run, and nothing is kept."""

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
from train.sampling import Draw, ScheduleSampler

GIB = 2**30


@dataclass(frozen=True)
class DryRun:
    """The findings of a dry run.

    Attributes:
        simulated: the heaviest step, on tensors without data.
        rows, rows_a_step, steps: to train on, of all processes in a step, and the optimiser steps of the whole run.
        schedules: a line for each that may be drawn.
        prompt_columns, new_tokens, estimate: of the widest batch, which is run first.
        measured_peak: bytes of a CUDA device; None on a CPU.
        seconds_a_step: of the heaviest step, after one that warmed up.
        tokens_per_second: of completions, likewise.
        seconds: the least and the most that its training is expected to take, from some of its own steps; without
            what comes before and after, and without checkpoints.
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
    """Build what the recipe says and run its widest batch under its heaviest schedules, and some of its own steps, in a
    folder that is removed.

    Raises ConfigError as `train.run.run` would.
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
    batch = _widest(prompts, completions, recipe.train.per_device_batch_size)
    prompt_columns, new_tokens = int(prompts[batch].max()), int(completions[batch].max())
    with whole_weights(prepared.arguments):  # also of the simulated model
        sampler, simulated = heaviest_step(
            recipe, prepared.model.config, prepared.sampler, prompt_columns=prompt_columns, new_tokens=new_tokens
        )
    processes = prepared.arguments.world_size
    copies = recipe.train.gradient_accumulation_steps * processes
    timed = choose_timed(plan_steps(prepared, bool(recipe.optim.distillation)), prepared.steps)
    widest = (batch * copies, sampler.at(0))
    steps = [widest, widest, *((each.step.rows, each.step.draws) for each in timed * ROUNDS)]  # the first warms up
    watch = StepWatch()
    with tempfile.TemporaryDirectory() as elsewhere:
        rehearsal = replace(
            prepared,
            encoded=replace(prepared.encoded, rows=rows.select([row for taken, _ in steps for row in taken])),
            validation=None,
            sampler=RehearsedDraws(**vars(prepared.sampler), draws=tuple(draws for _, draws in steps)),
            arguments=_rehearsal_arguments(prepared.arguments, elsewhere, len(steps)),
        )
        trainer = make_trainer(recipe, rehearsal, callbacks=[watch])
        trainer.train()
    _, heaviest, *seconds = watch.seconds
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
        seconds_a_step=heaviest,
        tokens_per_second=copies * int(completions[batch].sum()) / heaviest,
        seconds=estimate_seconds(
            timed, [seconds[number :: len(timed)] for number in range(len(timed))], validation_work(prepared)
        ),
    )


def _widest(prompts: "np.ndarray[Any, Any]", completions: "np.ndarray[Any, Any]", count: int) -> list[int]:
    """The longest rows, with the longest prompt and the longest completion among them; where too few, several times."""
    widest = list(map(int, (-prompts - completions).argsort()))
    chosen = widest if count == 1 else [int(prompts.argmax()), int(completions.argmax()), *widest]
    return list(islice(cycle(dict.fromkeys(chosen)), count))


def _rehearsal_arguments(arguments: TrainingArguments, folder: str, steps: int) -> TrainingArguments:
    """A copy that runs so many steps in the order of the rows; nothing is validated or saved."""
    changed = copy.copy(arguments)  # made anew, DeepSpeed would read its config again
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
class RehearsedDraws(ScheduleSampler):
    """Draws for each step what a list says."""

    draws: tuple[tuple[Draw, ...], ...] = ()

    def at(self, step: int) -> tuple[Draw, ...]:
        return self.draws[step]


class StepWatch(TrainerCallback):
    """A callback that takes the seconds of each optimiser step, and of reading and laying out its rows."""

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
    """Say what was found, on the first process alone."""
    if not is_first_process():
        return
    estimate, measured, (low, high) = found.estimate, found.measured_peak, found.seconds
    lines = [
        ("parameters", f"{found.simulated.parameters:,}, of which {found.simulated.trainable:,} are trained"),
        ("rows", f"{found.rows:,}"),
        ("effective batch size", f"{found.rows_a_step} rows"),
        ("steps", f"{found.steps:,}"),
        *(("schedule", line) for line in found.schedules),
        ("widest batch", f"{found.prompt_columns} columns of prompts, {found.new_tokens} of completions"),
        ("memory, estimated", f"{estimate.total / GIB:.2f} GiB a device at its peak"),
        ("  weights", f"{estimate.weights / GIB:.2f} GiB"),
        ("  optimiser", f"{estimate.optimiser / GIB:.2f} GiB"),
        ("  gradients, activations", f"{estimate.step / GIB:.2f} GiB"),
        *([("  on the host", f"{estimate.host / GIB:.2f} GiB")] if estimate.host else []),
        *([] if measured is None else [("memory, measured", f"{measured / GIB:.2f} GiB")]),
        (
            "seconds a step",
            f"{found.seconds_a_step:.3f}, the widest; {low / found.steps:.3f} to {high / found.steps:.3f} on average",
        ),
        ("tokens a second", f"{found.tokens_per_second:,.0f} of completions"),
        ("training", f"{_clock(low)} to {_clock(high)} (h:mm:ss), without checkpoints and the evaluation after it"),
    ]
    width = max(len(label) for label, _ in lines)
    print(f"{name}: a dry run; nothing was written")
    for label, value in lines:
        print(f"{label:<{width}}  {value}")


def _clock(seconds: float) -> str:
    """Such as 1:04:12."""
    return str(datetime.timedelta(seconds=round(seconds)))
