"""A rehearsal of a run: everything is built, its heaviest step is run for real, and nothing is kept."""

import copy
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from data.rows import row_lengths
from train.build import build_task
from train.distributed import is_first_process, whole_weights
from train.dry_run.memory import MemoryEstimate, estimate_memory, heaviest_step
from train.dry_run.simulation import SimulatedStep
from train.dry_run.work import mean_work, step_work
from train.evaluation import check_evaluation
from train.output import check_folder
from train.prepare import describe_schedules, make_arguments, make_trainer, prepare
from train.publish.parcel import check_publish
from train.recipe import Recipe

GIB = 2**30


@dataclass(frozen=True)
class DryRun:
    """The findings of a dry run.

    Attributes:
        simulated: the heaviest step, on tensors without data.
        rows, rows_a_step, steps: to train on, of all processes in a step, and the optimiser steps of the whole run.
        schedules: a line for each that may be drawn.
        prompt_columns, new_tokens, estimate: of the widest batch, the one that was run.
        measured_peak: bytes of a CUDA device; None on a CPU.
        seconds_a_step: of the heaviest step, after one that warmed up.
        tokens_per_second: of completions, likewise.
        seconds: about what the whole run takes, from the heaviest step, the mean length of rows and the schedules that
            its steps will draw.
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
    seconds: float


def dry_run(recipe: Recipe) -> DryRun:
    """Build what the recipe says and run its widest batch under its heaviest schedules, in a folder that is removed.

    Raises ConfigError as `train.run.run` would.
    """
    check_publish(recipe)
    folder = Path(str(recipe.output.dir))
    check_folder(folder, recipe)
    recipe = recipe.model_copy(update={"tracking": recipe.tracking.model_copy(update={"wandb": "off"})})
    task = build_task(recipe)
    prepared = prepare(recipe, task, make_arguments(recipe, folder))
    check_evaluation(recipe, task, prepared)
    rows = prepared.encoded.rows
    batch = _widest(rows, recipe.train.per_device_batch_size)
    prompt_columns = max(len(row["prompt_ids"]) for row in batch)
    new_tokens = max(len(row["completion_ids"]) for row in batch)
    with whole_weights(prepared.arguments):  # also of the simulated model
        sampler, simulated = heaviest_step(
            recipe, prepared.model.config, prepared.sampler, prompt_columns=prompt_columns, new_tokens=new_tokens
        )
    processes = prepared.arguments.world_size
    copies = recipe.train.gradient_accumulation_steps * processes
    watch = StepWatch()
    with tempfile.TemporaryDirectory() as elsewhere:
        rehearsal = replace(
            prepared,
            encoded=replace(prepared.encoded, rows=datasets.Dataset.from_list(batch * copies)),
            validation=None,
            sampler=sampler,
            arguments=_rehearsal_arguments(prepared.arguments, elsewhere),
        )
        trainer = make_trainer(recipe, rehearsal, callbacks=[watch])
        trainer.train()
    steps, distils = prepared.steps, bool(recipe.optim.distillation)
    prompt, completion = (float(lengths.mean()) for lengths in row_lengths(rows))
    mean = mean_work(prepared.sampler, steps, distils, prompt, completion)
    return DryRun(
        simulated=simulated,
        rows=len(rows),
        rows_a_step=prepared.rows_a_step,
        steps=steps,
        schedules=tuple(describe_schedules(prepared)),
        prompt_columns=prompt_columns,
        new_tokens=new_tokens,
        estimate=estimate_memory(recipe, simulated, processes),
        measured_peak=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        seconds_a_step=watch.seconds,
        tokens_per_second=copies * sum(len(row["completion_ids"]) for row in batch) / watch.seconds,
        seconds=steps * watch.seconds * mean / step_work(sampler.at(0), distils, prompt_columns, new_tokens),
    )


def _widest(rows: datasets.Dataset, count: int) -> list[dict[str, Any]]:
    """The longest rows, with the longest prompt and the longest completion among them; where too few, several times."""
    prompts, completions = row_lengths(rows)
    widest = list(map(int, (-prompts - completions).argsort()))
    chosen = widest if count == 1 else [int(prompts.argmax()), int(completions.argmax()), *widest]
    return [rows[number] for number in islice(cycle(dict.fromkeys(chosen)), count)]


def _rehearsal_arguments(arguments: TrainingArguments, folder: str) -> TrainingArguments:
    """A copy that runs two steps in the order of the rows, the first to warm up; nothing is validated or saved."""
    changed = copy.copy(arguments)  # made anew, DeepSpeed would read its config again
    changed.output_dir = folder
    changed.max_steps = 2
    changed.save_strategy = SaveStrategy.NO
    changed.eval_strategy = IntervalStrategy.NO
    changed.load_best_model_at_end = False
    changed.logging_strategy = IntervalStrategy.NO
    changed.train_sampling_strategy = "sequential"
    changed.report_to = []
    return changed


class StepWatch(TrainerCallback):
    """A callback that takes the seconds of the last optimiser step."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = _now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = _now() - self._start


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def print_dry_run(found: DryRun, name: str) -> None:
    """Say what was found, on the first process alone."""
    if not is_first_process():
        return
    estimate, measured = found.estimate, found.measured_peak
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
        ("seconds a step", f"{found.seconds_a_step:.3f}, the widest"),
        ("tokens a second", f"{found.tokens_per_second:,.0f} of completions"),
        ("the whole run", f"about {found.seconds / 3600:.2f} hours"),
    ]
    width = max(len(label) for label, _ in lines)
    print(f"{name}: a dry run; nothing was written")
    for label, value in lines:
        print(f"{label:<{width}}  {value}")
