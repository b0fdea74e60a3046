"""The loss of a training step: a forward pass of the batch under each schedule of the step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from skipdecode.families import FAMILIES, unwrap
from skipdecode.gating import LayerGate, skip_layers
from skipdecode.schedule.schedule import SkipSchedule
from skipdecode.training.exits import Exits, run_exits
from skipdecode.training.objective import DepthBands, Objective, unpack_batch


def step_loss(
    model: nn.Module,
    batch: Mapping[str, Any],
    schedules: Sequence[SkipSchedule],
    objective: Objective = Objective(),  # noqa: B008  # it is frozen
    **options: Any,
) -> torch.Tensor:
    """The loss of a batch under all schedules of a step, for a training loop of your own.

    It is a scalar with a gradient and not the result of a backward pass, so the loop stays what it was: call
    `loss.backward()`, scaled or accumulated as usual. The activations of all schedules are in memory until then. Where
    they don't fit, take the losses one by one, which has the same gradient:
    `for loss in step_losses(...): loss.backward()`.

    Args:
        model: the model to train, wrapped or not.
        batch: a batch of `PromptCompletionCollator`, on the model's device.
        schedules: the schedules of the step, slowest first, such as `sampler.at(step)` draws them.
        objective: the loss.
        **options: the keyword arguments of `step_losses`.

    Returns:
        A scalar: the mean over the schedules.
    """
    return torch.stack(list(step_losses(model, batch, schedules, objective, **options))).sum()


def step_losses(
    model: nn.Module,
    batch: Mapping[str, Any],
    schedules: Sequence[SkipSchedule],
    objective: Objective,
    *,
    totals: torch.Tensor | None = None,
    bands: DepthBands | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    on_pass: Callable[[LayerGate], None] | None = None,
    teacher: nn.Module | None = None,
    step: int = 0,
) -> Iterator[torch.Tensor]:
    """Yield the loss of each schedule for a batch, as `Objective.shares` does, running the model's passes.

    Args:
        model: the model to train, wrapped or not.
        batch: a batch from `PromptCompletionCollator`, on the model's device.
        schedules: see `Objective.shares`.
        objective: the loss.
        totals: see `Objective.shares`.
        bands: see `Objective.shares`.
        autocast: makes the precision context of passes outside the model: an exit's head, or the teacher.
        on_pass: called with the gate of each pass under a schedule, after the pass.
        teacher: a frozen model in evaluation mode; None: the model itself teaches.
        step: see `Objective.shares`.
    """
    prompt_columns, arguments, labels = unpack_batch(batch)

    def run(schedule: SkipSchedule, **changes: Any) -> torch.Tensor:
        with skip_layers(model, schedule, prompt_columns=prompt_columns, keep_in_graph=True) as gate:
            logits: torch.Tensor = model(**{**arguments, **changes}).logits
        if on_pass is not None:
            on_pass(gate)
        return logits

    @torch.no_grad()
    def teach() -> torch.Tensor:
        """The logits of the frozen teacher, or of the model itself at full depth without dropout."""
        if teacher is not None:
            with autocast():
                taught: torch.Tensor = teacher(**arguments).logits
            return taught
        model.eval()
        logits: torch.Tensor = model(**arguments).logits
        model.train()
        return logits

    def every_exit(schedule: SkipSchedule) -> Exits:
        # DDP finds the parameters with a gradient in the graph of the pass's output, so logits of one position are
        # kept.
        return run_exits(model, lambda: run(schedule, logits_to_keep=1), labels.shape[1], autocast)

    return objective.shares(schedules, labels, run, teach, every_exit, totals=totals, bands=bands, step=step)


def uses_every_parameter(model: nn.Module) -> bool:
    """Whether every pass of `step_losses` gives all parameters that are trained a gradient, whatever its schedule.

    What a schedule skips gets a gradient of zeros (`skip_layers`, `keep_in_graph`), so this depends on the model alone.
    One whose parts aren't known, or that has others, may have parameters that its forward pass doesn't reach, such as
    those of cross-attention.
    """
    config = unwrap(model).config
    family = FAMILIES.get(config.model_type)
    parts = None if family is None else family.parts
    return parts is not None and all(getattr(config, name, value) == value for name, value in parts.plain.items())
