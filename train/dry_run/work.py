"""The work of a training step, so that runs can be compared at equal work."""

from collections.abc import Sequence

from train.sampling import Draw, ScheduleSampler

SAMPLED_STEPS = 200  # whose schedules say what the steps of a run compute
FORWARD_SHARE = 1 / 3  # of a pass forward and backward: what the teacher of a distillation costs


def step_work(
    draws: Sequence[Draw], distils: bool, prompt_columns: float, new_tokens: float, *, frozen_teacher: bool = False
) -> float:
    """The work of a row in a step, in passes of one column through every layer, forward and backward.

    Args:
        draws: the schedules of the step.
        distils: whether what skips is compared with full depth, which is then run forward where it isn't among them.
        prompt_columns, new_tokens: tokens of the prompt and of the completion.
        frozen_teacher: whether another model teaches, which is then run forward in every step.
    """
    prompt, columns = max(1, round(prompt_columns)), round(prompt_columns + new_tokens)
    passes = sum(draw.schedule.computed_share(prompt, columns) for draw in draws)
    full_depth = any(not draw.schedule.skips for draw in draws)
    teacher = FORWARD_SHARE if distils and (frozen_teacher or not full_depth) else 0.0
    return (passes + teacher) * columns


def mean_work(
    sampler: ScheduleSampler,
    steps: int,
    distils: bool,
    prompt_columns: float,
    new_tokens: float,
    *,
    frozen_teacher: bool = False,
) -> float:
    """The mean of `step_work` over the steps of a run: length grouping makes batches about as wide as their rows."""
    sampled = range(min(steps, SAMPLED_STEPS))
    lengths = (prompt_columns, new_tokens)
    work = [step_work(sampler.at(step), distils, *lengths, frozen_teacher=frozen_teacher) for step in sampled]
    return sum(work) / len(work)
