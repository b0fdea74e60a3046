"""The loss covers completions only, and is weighted and logged by the number of layers of each token."""

import math
from unittest.mock import Mock

import pytest
import torch

from skipdecode import SkipSchedule
from skipdecode.training.batch_layout import IGNORED
from skipdecode.training.objective import DepthBands, Objective, completion_loss, distillation_loss, predicting_budgets
from skipdecode.training.sampling import Draw
from train.dry_run.work import step_work

SCHEDULE = SkipSchedule(8, 6, 2, horizon=4)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 11, generator=generator)
    labels = torch.randint(0, 11, (3, 5), generator=generator)
    labels[0, 3:] = IGNORED
    labels[2, 1:] = IGNORED
    return logits, labels


def token_loss(logits: torch.Tensor, label: int) -> float:
    exponentials = [math.exp(x) for x in logits.tolist()]
    return -math.log(exponentials[label] / sum(exponentials))


def test_the_first_predicting_budget_is_that_of_the_prompt() -> None:
    assert predicting_budgets(SCHEDULE, 6) == [8, 6, 5, 3, 2, 2]
    bounded = SkipSchedule(8, 6, 2, horizon=4, prompt="max")
    assert predicting_budgets(bounded, 3) == [6, 6, 5]


@pytest.mark.parametrize("power", [0.0, 1.0, -0.5])
def test_the_loss_is_the_mean_over_completion_tokens_weighted_by_depth(power: float) -> None:
    logits, labels = batch()
    budgets = predicting_budgets(SCHEDULE, 5)
    total = weight_sum = 0.0
    for row in range(3):
        for column in range(5):
            if labels[row, column] == IGNORED:
                continue
            weight = (budgets[column] / 8) ** power
            total += weight * token_loss(logits[row, column], int(labels[row, column]))
            weight_sum += weight
    loss = completion_loss(logits, labels, budgets, num_layers=8, depth_weight_power=power)
    assert float(loss) == pytest.approx(total / weight_sum, rel=1e-5)


@pytest.mark.parametrize("power", [0.0, 1.0, -0.5])
def test_losses_of_parts_divided_by_the_batchs_totals_add_up_to_its_loss(power: float) -> None:
    """Rows have different lengths, so that the parts' mean weights differ."""
    logits, labels = batch()
    objective = Objective(power, label_smoothing=0.1, distillation=0.3)
    full, faster = SkipSchedule(8, 8, 8), SCHEDULE
    logits = torch.cat([logits, logits[:, -1:]], dim=1)
    other = logits.roll(1, dims=-1)

    def loss(rows: slice, totals: torch.Tensor | None = None) -> float:
        run = {full: logits[rows], faster: other[rows]}.__getitem__
        shares = objective.shares([full, faster], labels[rows], run, Mock(), Mock(), totals=totals)
        return float(sum(shares))

    whole, parts = slice(None), [slice(0, 1), slice(1, 3)]
    totals = sum(objective.totals([full, faster], labels[part]) for part in parts)
    assert isinstance(totals, torch.Tensor)
    assert sum(loss(part, totals) for part in parts) == pytest.approx(loss(whole), rel=1e-6)


def test_distillation_is_the_divergence_from_the_teacher_over_completion_tokens() -> None:
    logits, labels = batch()
    teacher = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    total = 0.0
    for row, column in (labels != IGNORED).nonzero().tolist():
        p, q = teacher[row, column].softmax(-1).tolist(), logits[row, column].softmax(-1).tolist()
        total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert float(distillation_loss(logits, teacher, labels, num_items=40)) == pytest.approx(total / 40, rel=1e-4)
    assert float(distillation_loss(teacher, teacher, labels, num_items=40)) == pytest.approx(0, abs=1e-6)


def test_schedules_with_stopped_prompts_are_taught_by_full_depth() -> None:
    logits, labels = batch()
    logits = torch.cat([logits, logits[:, -1:]], dim=1)
    taught, stopped = logits.roll(1, dims=-1), SkipSchedule(8, 8, 8, prompt_stop=4)
    shares = Objective(distillation=1.0).shares([stopped], labels, lambda _: logits, lambda: taught, Mock())
    tokens = int((labels != IGNORED).sum())
    expected = distillation_loss(logits[:, :-1], taught[:, :-1], labels, num_items=tokens)
    assert float(next(shares)) == pytest.approx(float(expected))
    draws = [Draw(1.0, stopped)]
    assert step_work(draws, True, 3, 5) > step_work(draws, False, 3, 5)


def test_a_frozen_teacher_also_teaches_full_depth() -> None:
    logits, labels = batch()
    logits = torch.cat([logits, logits[:, -1:]], dim=1)
    taught, full = logits.roll(1, dims=-1), SkipSchedule(8, 8, 8)
    runs = {full: logits, SCHEDULE: logits.roll(2, dims=-1)}
    frozen = Objective(distillation=0.75, frozen_teacher=True)
    found = list(frozen.shares([full, SCHEDULE], labels, runs.__getitem__, lambda: taught, Mock()))
    tokens = int((labels != IGNORED).sum())
    for share, schedule in zip(found, (full, SCHEDULE), strict=True):
        student = runs[schedule][:, :-1]
        divergence = distillation_loss(student, taught[:, :-1], labels, num_items=tokens)
        loss = completion_loss(student, labels, predicting_budgets(schedule, 5), num_layers=8)
        assert float(share) == pytest.approx(float(0.25 * loss + 0.75 * divergence) / 2, rel=1e-5)
    draws = [Draw(1.0, full), Draw(2.0, SCHEDULE)]
    assert step_work(draws, True, 3, 5, frozen_teacher=True) > step_work(draws, True, 3, 5)


def test_bands_group_the_loss_by_depth() -> None:
    logits, labels = batch()
    bands = DepthBands(8)
    budgets = predicting_budgets(SCHEDULE, 5)
    loss = completion_loss(logits, labels, budgets, num_layers=8, bands=bands)
    expected: dict[str, list[float]] = {}
    names = {8: "loss_layers_7_to_8", 6: "loss_layers_5_to_6", 5: "loss_layers_5_to_6"}
    names |= {3: "loss_layers_3_to_4", 2: "loss_layers_1_to_2"}
    for row, column in (labels != IGNORED).nonzero().tolist():
        value = token_loss(logits[row, column], int(labels[row, column]))
        expected.setdefault(names[budgets[column]], []).append(value)
    taken = bands.take()
    assert taken == {name: pytest.approx(sum(v) / len(v), rel=1e-5) for name, v in expected.items()}
    tokens = sum(map(len, expected.values()))
    assert float(loss) == pytest.approx(sum(sum(v) for v in expected.values()) / tokens, rel=1e-5)
    assert bands.take() == {}


def test_a_model_with_fewer_layers_than_bands_has_fewer_bands() -> None:
    bands = DepthBands(2)
    assert {bands.name(bands.band(budget)) for budget in (1, 2)} == {"loss_layers_1_to_1", "loss_layers_2_to_2"}
