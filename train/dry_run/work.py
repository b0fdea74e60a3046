"""The computational work of a training step."""

from collections.abc import Sequence

from skipdecode.training.sampling import Draw

FORWARD_SHARE = 1 / 3  # cost of a forward pass, as a share of a forward and backward pass


def step_work(
    draws: Sequence[Draw], distils: bool, prompt_columns: float, new_tokens: float, *, frozen_teacher: bool = False
) -> float:
    """The work of one row in a step; the unit is one position's forward and backward pass through every layer.

    Args:
        draws: the targets and schedules of the step.
        distils: whether the loss includes distillation; its teacher, full depth, is an extra forward pass unless it is
            among the schedules.
        prompt_columns: length of the prompt, in tokens.
        new_tokens: length of the completion, in tokens.
        frozen_teacher: whether the teacher is another model, which needs a forward pass in every step.
    """
    prompt, positions = max(1, round(prompt_columns)), round(prompt_columns + new_tokens)
    passes = sum(draw.schedule.computed_share(prompt, positions) for draw in draws)
    full_depth = any(not draw.schedule.skips for draw in draws)
    teacher = FORWARD_SHARE if distils and (frozen_teacher or not full_depth) else 0.0
    return (passes + teacher) * positions
