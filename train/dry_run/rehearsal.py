"""A rehearsal of a run: everything is built, its widest step is run for real, and nothing is kept."""

import contextlib
import copy
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from data.rows import row_lengths
from train.build import build_task
from train.distributed import is_first_process
from train.dry_run.memory import MemoryEstimate, costliest_steps, estimate_memory, simulate_recipe
from train.dry_run.simulation import Kernels
from train.dry_run.work import mean_work, step_work
from train.evaluation import check_evaluation
from train.output import check_folder
from train.prepare import describe_schedules, make_arguments, make_trainer, prepare
from train.recipe import Recipe
from train.sampling import Draw, ScheduleSampler

GIB = 2**30


@dataclass(frozen=True)
class DryRun:
    """What a dry run found.

    Attributes:
        parameters, trainable: of the model.
        rows: to train on.
        rows_a_step: on all processes.
        steps: optimiser steps of the whole run.
        schedules: a line for each that may be drawn.
        prompt_columns, new_tokens: of the widest batch, the one that was run.
        column_share: the layer-columns that its schedules run, as a share of full depth's.
        estimate: of the memory that this batch needs.
        measured_peak: bytes of a CUDA device; on a CPU those of the process, beside what it held without the model.
            None where the system doesn't say.
        seconds_a_step: of the widest step, after one that warmed up.
        tokens_per_second: of completions, likewise.
        seconds: about what the whole run takes, from the widest step, the mean length of rows and the schedules that
            its steps will draw.
    """

    parameters: int
    trainable: int
    rows: int
    rows_a_step: int
    steps: int
    schedules: tuple[str, ...]
    prompt_columns: int
    new_tokens: int
    column_share: float
    estimate: MemoryEstimate
    measured_peak: int | None
    seconds_a_step: float
    tokens_per_second: float
    seconds: float


def dry_run(recipe: Recipe) -> DryRun:
    """Build what the recipe says and run its widest batch under its costliest schedules, in a folder that is removed.

    Raises ConfigError as `train.run.run` would.
    """
    folder = Path(str(recipe.output.dir))
    check_folder(folder, recipe)
    recipe = recipe.model_copy(update={"tracking": recipe.tracking.model_copy(update={"wandb": "off"})})
    task = build_task(recipe)
    prepared = prepare(recipe, task, make_arguments(recipe, folder))
    check_evaluation(recipe, task, prepared)
    distils = bool(recipe.optim.distillation)
    candidates = costliest_steps(prepared.sampler, distils)
    batch = _widest(prepared.encoded.rows, recipe.train.per_device_batch_size)
    prompt_columns = max(len(row["prompt_ids"]) for row in batch)
    new_tokens = max(len(row["completion_ids"]) for row in batch)
    kernels: Kernels = "cuda" if torch.cuda.is_available() else "cpu"
    simulated = simulate_recipe(
        recipe,
        prepared.model.config,
        candidates,
        prompt_columns=prompt_columns,
        new_tokens=new_tokens,
        rows=len(batch),
        kernels=kernels,
    )
    processes = prepared.arguments.world_size
    copies = recipe.train.gradient_accumulation_steps * processes
    watch = StepWatch(simulated.weights)
    with tempfile.TemporaryDirectory() as elsewhere:
        rehearsal = replace(
            prepared,
            encoded=replace(prepared.encoded, rows=datasets.Dataset.from_list(batch * copies)),
            validation=None,
            sampler=FixedSteps.of(prepared.sampler, candidates),
            arguments=_rehearsal_arguments(prepared.arguments, elsewhere, 2 * len(candidates)),
        )
        trainer = make_trainer(recipe, rehearsal, callbacks=[watch])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    seconds = watch.seconds[len(candidates) :]  # the first of each warmed up
    slowest = max(seconds)
    draws = candidates[seconds.index(slowest)]
    steps = _steps(recipe, len(prepared.encoded.rows), processes)
    prompt, completion = (float(lengths.mean()) for lengths in row_lengths(prepared.encoded.rows))
    columns = prompt_columns + new_tokens
    return DryRun(
        parameters=simulated.parameters,
        trainable=simulated.trainable,
        rows=len(prepared.encoded.rows),
        rows_a_step=prepared.rows_a_step,
        steps=steps,
        schedules=tuple(describe_schedules(prepared)),
        prompt_columns=prompt_columns,
        new_tokens=new_tokens,
        column_share=sum(d.schedule.column_share(prompt_columns, columns) for d in draws) / len(draws),
        estimate=estimate_memory(recipe, simulated, processes),
        measured_peak=watch.peak(),
        seconds_a_step=slowest,
        tokens_per_second=copies * sum(len(row["completion_ids"]) for row in batch) / slowest,
        seconds=steps
        * slowest
        * mean_work(prepared.sampler, steps, distils, prompt, completion)
        / step_work(draws, distils, prompt_columns, new_tokens),
    )


def _widest(rows: datasets.Dataset, count: int) -> list[dict[str, Any]]:
    """The longest rows, with the longest prompt and the longest completion among them; where too few, several times."""
    prompts, completions = row_lengths(rows)
    chosen = [int(prompts.argmax()), int(completions.argmax()), *map(int, (-prompts - completions).argsort())]
    return [rows[number] for number in islice(cycle(dict.fromkeys(chosen)), count)]


def _rehearsal_arguments(arguments: TrainingArguments, folder: str, steps: int) -> TrainingArguments:
    """A copy that runs a few steps in the order of the rows and saves nothing."""
    changed = copy.copy(arguments)  # made anew, DeepSpeed would read its config again
    changed.output_dir = folder
    changed.max_steps = steps
    changed.save_strategy = SaveStrategy.NO
    changed.logging_strategy = IntervalStrategy.NO
    changed.train_sampling_strategy = "sequential"
    changed.report_to = []
    changed.disable_tqdm = True
    return changed


def _steps(recipe: Recipe, rows: int, processes: int) -> int:
    """The optimiser steps of the whole run, as the Trainer counts them."""
    if recipe.train.max_steps is not None:
        return recipe.train.max_steps
    batches = math.ceil(rows / (recipe.train.per_device_batch_size * processes))
    return math.ceil(recipe.train.epochs * max(1, math.ceil(batches / recipe.train.gradient_accumulation_steps)))


@dataclass(frozen=True)
class FixedSteps(ScheduleSampler):
    """Draws the given steps in turn."""

    fixed: tuple[tuple[Draw, ...], ...] = ()

    @classmethod
    def of(cls, sampler: ScheduleSampler, steps: Sequence[tuple[Draw, ...]]) -> "FixedSteps":
        return cls(sampler.speedups, sampler.schedules, sampler.weights, sampler.seed, sampler.sampling, tuple(steps))

    def at(self, step: int) -> tuple[Draw, ...]:
        return self.fixed[step % len(self.fixed)]


class StepWatch(TrainerCallback):
    """The seconds of each optimiser step, and the most memory that they took.

    Args:
        weights: bytes of the model. On a CPU the peak is that of the process beside what it holds when the first step
            starts, when the model is there already.
    """

    def __init__(self, weights: int) -> None:
        self.seconds: list[float] = []
        self._weights = weights
        self._held: int | None = None
        self._start = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._held = _status("VmRSS")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        elif self._held is not None:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # else it's that of everything before, such as imports

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._start = _now()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.seconds.append(_now() - self._start)

    def peak(self) -> int | None:
        """Bytes; None where the system doesn't say."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        peak = _status("VmHWM")
        return None if peak is None or self._held is None else peak - self._held + self._weights


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _status(key: str) -> int | None:
    """Bytes from Linux's account of this process."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)


def print_dry_run(found: DryRun, name: str) -> None:
    """Say what was found, on the first process alone."""
    if not is_first_process():
        return
    estimate, measured = found.estimate, found.measured_peak
    parts = ("weights", "gradients", "optimiser", "activations")
    lines = [
        ("parameters", f"{found.parameters:,}, of which {found.trainable:,} are trained"),
        ("rows", f"{found.rows:,}"),
        ("effective batch size", f"{found.rows_a_step} rows"),
        ("steps", f"{found.steps:,}"),
        *(("schedule", line) for line in found.schedules),
        ("widest batch", f"{found.prompt_columns} columns of prompts, {found.new_tokens} of completions"),
        ("layer-columns run", f"{found.column_share:.3f} of full depth's, in the costliest step"),
        ("memory, estimated", f"{estimate.total / GIB:.2f} GiB a device at its peak"),
        *((f"  {part}", f"{getattr(estimate, part) / GIB:.2f} GiB") for part in parts),
        *([("  on the host", f"{estimate.host / GIB:.2f} GiB")] if estimate.host else []),
        ("memory, measured", "not known on this system" if measured is None else f"{measured / GIB:.2f} GiB"),
        ("seconds a step", f"{found.seconds_a_step:.3f}, the widest"),
        ("tokens a second", f"{found.tokens_per_second:,.0f} of completions"),
        ("the whole run", f"about {found.seconds / 3600:.2f} hours"),
    ]
    width = max(len(label) for label, _ in lines)
    print(f"{name}: a dry run; nothing was written")
    for label, value in lines:
        print(f"{label:<{width}}  {value}")
