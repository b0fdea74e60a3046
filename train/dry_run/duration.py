"""An estimate of a run's duration: a few of its steps are timed, each of which represents steps of similar work."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from data.rows import row_lengths
from skipdecode.training.mixin import validated_draws
from skipdecode.training.sampling import Draw
from train.data_order import DataOrder
from train.dry_run.work import FORWARD_SHARE, step_work
from train.prepare import Prepared

PLANNED_STEPS = 1000  # maximum number of steps, evenly spaced over the run, whose work is computed
TIMED_STEPS = 8  # number of them that are timed, from the lightest to the heaviest
ROUNDS = 2  # number of times that each is timed
MARGIN = 0.1  # relative uncertainty of a step's time among steps of equal work


@dataclass(frozen=True)
class PlannedStep:
    """A step that the run will take.

    Attributes:
        rows: indices of its rows, in the order in which the processes take them.
        draws: its targets and schedules.
        work: work of the process with the most of it, in the units of `step_work`.
    """

    rows: tuple[int, ...]
    draws: tuple[Draw, ...]
    work: float


@dataclass(frozen=True)
class TimedStep:
    """A step to time.

    Attributes:
        step: the step.
        count: number of steps of the run that it represents, measured in its own work; need not be an integer.
    """

    step: PlannedStep
    count: float


def plan_steps(prepared: Prepared, distils: bool) -> list[PlannedStep]:
    """The steps that a run will take, or PLANNED_STEPS of them, with their rows and schedules.

    Args:
        prepared: the run.
        distils: whether the loss includes distillation.
    """
    arguments, rows_a_step = prepared.arguments, prepared.rows_a_step
    prompts, completions = row_lengths(prepared.encoded.rows)
    order = DataOrder((prompts + completions).tolist(), rows_a_step, arguments.seed)
    steps_an_epoch = len(order) // rows_a_step
    count = min(prepared.steps, PLANNED_STEPS)
    work = functools.cache(functools.partial(step_work, distils=distils, frozen_teacher=prepared.teacher is not None))
    batch, processes = arguments.train_batch_size, arguments.world_size

    def max_work(rows: Sequence[int], draws: tuple[Draw, ...]) -> float:
        by_process = [0.0] * processes
        for number in range(rows_a_step // batch):  # batches go to the processes in turn
            in_batch = rows[number * batch : (number + 1) * batch]
            lengths = {"prompt_columns": int(prompts[in_batch].max()), "new_tokens": int(completions[in_batch].max())}
            by_process[number % processes] += batch * work(draws, **lengths)
        return max(by_process)

    def planned() -> Iterator[PlannedStep]:
        chosen = [number * prepared.steps // count for number in range(count)]
        for _, steps in groupby(chosen, key=lambda step: step // steps_an_epoch):
            epoch: list[int] = []
            for step in steps:
                if not epoch:
                    order.start(step)
                    epoch = list(order)
                start = step % steps_an_epoch * rows_a_step
                rows, draws = epoch[start : start + rows_a_step], prepared.sampler.at(step)
                yield PlannedStep(tuple(rows), draws, max_work(rows, draws))

    return list(planned())


def choose_timed(plan: Sequence[PlannedStep], steps: int) -> list[TimedStep]:
    """Choose the steps to time: the plan is sorted by work and split into TIMED_STEPS parts, each with one timed step.

    The timed step of a part is the one nearest to the part's mean work.

    Args:
        plan: the steps from `plan_steps`.
        steps: number of steps of the run.
    """
    ordered = sorted(plan, key=lambda step: step.work)
    chosen = []
    for numbers in np.array_split(np.arange(len(ordered)), min(TIMED_STEPS, len(ordered))):
        part = [ordered[number] for number in numbers]
        total = sum(step.work for step in part)
        timed = min(part, key=lambda step: abs(step.work - total / len(part)))
        chosen.append(TimedStep(timed, steps / len(plan) * total / timed.work))
    return chosen


def validation_work(prepared: Prepared) -> float:
    """The work of one process in all validations of a run, in the units of `step_work`; 0 without validation."""
    if prepared.validation is None:
        return 0.0
    arguments = prepared.arguments
    prompts, completions = row_lengths(prepared.validation)
    order = (prompts + completions).argsort()  # rows of similar length are validated together
    draws = validated_draws(prepared.sampler)
    rows = arguments.per_device_eval_batch_size * arguments.world_size
    batches = [order[start : start + rows] for start in range(0, len(order), rows)]
    once: float = sum(
        len(batch) / arguments.world_size * step_work(draws, False, prompts[batch].max(), completions[batch].max())
        for batch in batches
    )
    return -(-prepared.steps // arguments.save_steps) * FORWARD_SHARE * once


def estimate_seconds(
    timed: Sequence[TimedStep], seconds: Sequence[Sequence[float]], more_work: float = 0.0
) -> tuple[float, float]:
    """The minimum and the maximum expected duration of a run, in seconds.

    Args:
        timed: the timed steps.
        seconds: the measured times of each, in seconds.
        more_work: work of the run besides its steps, in the units of `step_work`.
    """
    share = 1 + more_work / sum(each.count * each.step.work for each in timed)
    low, high = (sum(each.count * pick(took) for each, took in zip(timed, seconds, strict=True)) for pick in (min, max))
    return (1 - MARGIN) * share * low, (1 + MARGIN) * share * high
