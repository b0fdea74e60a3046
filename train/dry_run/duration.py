"""How long a run takes: a few of its own steps are timed, each for all that are about as much work."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from data.rows import row_lengths
from train.data_order import DataOrder
from train.dry_run.work import FORWARD_SHARE, step_work
from train.prepare import Prepared
from train.sampling import Draw
from train.trainer import validated_draws

PLANNED_STEPS = 1000  # steps of a run, evenly spaced, whose work is counted
TIMED_STEPS = 8  # those of them that are timed, from the lightest to the heaviest
ROUNDS = 2  # times that each of them is timed
MARGIN = 0.1  # a step takes up to this share more or less than others of the same work


@dataclass(frozen=True)
class PlannedStep:
    """A step that the run will take.

    Attributes:
        rows: numbers of its rows, in the order in which the processes take them.
        draws: its schedules.
        work: in the units of `step_work`, of all rows of the process that has the most to do.
    """

    rows: tuple[int, ...]
    draws: tuple[Draw, ...]
    work: float


@dataclass(frozen=True)
class TimedStep:
    """A step that is timed.

    Attributes:
        step: the step.
        count: how many steps of the whole run it stands for: as many as have the work of all those near to it.
    """

    step: PlannedStep
    count: float


def plan_steps(prepared: Prepared, distils: bool) -> list[PlannedStep]:
    """The steps that the run will take, or PLANNED_STEPS of them: its rows in its order, under the schedules it draws.

    Args:
        prepared: the run.
        distils: whether its objective compares what skips with full depth.
    """
    arguments, rows_a_step = prepared.arguments, prepared.rows_a_step
    prompts, completions = row_lengths(prepared.encoded.rows)
    order = DataOrder((prompts + completions).tolist(), rows_a_step, arguments.seed)
    steps_an_epoch = len(order) // rows_a_step
    count = min(prepared.steps, PLANNED_STEPS)
    work = functools.cache(functools.partial(step_work, distils=distils, frozen_teacher=prepared.teacher is not None))
    batch, processes = arguments.train_batch_size, arguments.world_size

    def most_work(rows: Sequence[int], draws: tuple[Draw, ...]) -> float:
        by_process = [0.0] * processes
        for number in range(rows_a_step // batch):  # batches go to the processes in turn
            mine = rows[number * batch : (number + 1) * batch]
            widths = {"prompt_columns": int(prompts[mine].max()), "new_tokens": int(completions[mine].max())}
            by_process[number % processes] += batch * work(draws, **widths)
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
                yield PlannedStep(tuple(rows), draws, most_work(rows, draws))

    return list(planned())


def choose_timed(plan: Sequence[PlannedStep], steps: int) -> list[TimedStep]:
    """The steps of a plan to time: of each of TIMED_STEPS parts, by work, the step that is nearest to the part's mean.

    Args:
        plan: as `plan_steps` gives it.
        steps: of the whole run.
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
    """The work of all validations of a run, in the units of `step_work`, of one process; 0 where there are none."""
    if prepared.validation is None:
        return 0.0
    arguments = prepared.arguments
    prompts, completions = row_lengths(prepared.validation)
    order = (prompts + completions).argsort()  # rows of like length are validated together
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
    """The least and the most seconds that a run is expected to take.

    Args:
        timed: the steps that were timed.
        seconds: of each, all times that it took.
        more_work: of the run beside its steps, in the units of theirs.
    """
    share = 1 + more_work / sum(each.count * each.step.work for each in timed)
    low, high = (sum(each.count * pick(took) for each, took in zip(timed, seconds, strict=True)) for pick in (min, max))
    return (1 - MARGIN) * share * low, (1 + MARGIN) * share * high
