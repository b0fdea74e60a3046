"""DDP searches for parameters without a gradient only where a step may leave some."""

from pathlib import Path
from typing import Any

import pytest
from fastpath_cases import fresh
from tiny_models import OPT_KINDS, TINY_FAMILIES, randomised, tiny_config
from torch import nn
from transformers import TrainingArguments

from skipdecode import SkipSchedule, skip_layers
from skipdecode.training import Objective, PromptCompletionCollator, SkipTrainingMixin, step_losses
from skipdecode.training.objective import unpack_batch
from skipdecode.training.step import uses_every_parameter

LAYERS = 6
FULL = SkipSchedule.full_depth(LAYERS)
# In the first two no position runs the layers that are skipped.
SKIPPING = [
    SkipSchedule(LAYERS, 2, 2, decay="constant", prompt="max"),
    SkipSchedule(LAYERS, 4, 2, horizon=4, prompt="max", prompt_stop=1),
    SkipSchedule(LAYERS, 3, 1, horizon=4),
]
ROWS = [{"prompt_ids": [5] * length, "completion_ids": [6, 7, 8] * length} for length in (2, 3)]


def batch() -> dict[str, Any]:
    return PromptCompletionCollator(1)(ROWS)


def cross_attending() -> nn.Module:
    """A GPT-2 with cross-attention, which a forward pass without an encoder's output doesn't reach."""
    return randomised(tiny_config("gpt2", **TINY_FAMILIES["gpt2"], add_cross_attention=True), seed=0)


def unused(model: nn.Module, schedule: SkipSchedule, objective: Objective = Objective()) -> list[str]:  # noqa: B008
    """The parameters that a step leaves without a gradient."""
    model.train()
    for loss in step_losses(model, batch(), [schedule], objective):
        loss.backward()
    found = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", [*OPT_KINDS, *TINY_FAMILIES])
def test_no_schedule_leaves_a_parameter_without_a_gradient(name: str) -> None:
    model = fresh(name)
    assert uses_every_parameter(model)
    assert [unused(model, schedule) for schedule in SKIPPING] == [[]] * len(SKIPPING)
    assert unused(model, FULL, Objective(exits=True, exit_every=2)) == []
    with skip_layers(model, SKIPPING[0], prompt_columns=3):  # decoding's way, in which skipped layers don't run
        model(**unpack_batch(batch())[1]).logits.sum().backward()
    assert any(parameter.grad is None for parameter in model.parameters())


def test_a_model_with_parts_that_no_pass_reaches_is_searched() -> None:
    model = cross_attending()
    assert not uses_every_parameter(model)
    assert all("crossattention" in name or "ln_cross_attn" in name for name in unused(model, FULL))
    assert unused(model, FULL)


@pytest.mark.parametrize(("make", "chosen", "searched"), [
    (lambda: fresh("llama"), None, False),
    (lambda: fresh("llama"), True, True),
    (cross_attending, None, True),
    (cross_attending, False, False),
])  # fmt: skip
def test_the_search_is_off_where_it_would_find_nothing_unless_the_user_chose(
    make: Any, chosen: bool | None, searched: bool, tmp_path: Path
) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], ddp_find_unused_parameters=chosen)
    trainer = SkipTrainingMixin(make(), args, train_dataset=ROWS, speedups=(1, 2))
    assert trainer.accelerator.ddp_handler.find_unused_parameters is searched
