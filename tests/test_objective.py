"""The loss counts completions alone, and knows how deep each token ran."""

import math

import pytest
import torch

from data.columns import IGNORED
from skipdecode import SkipSchedule
from train.objective import DepthBands, completion_loss, distillation_loss, predicting_budgets

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


def test_budgets_of_predicting_columns_start_with_the_prefill() -> None:
    assert predicting_budgets(SCHEDULE, 6) == [8, 6, 5, 3, 2, 2]
    bounded = SkipSchedule(8, 6, 2, horizon=4, prompt="max")
    assert predicting_budgets(bounded, 3) == [6, 6, 5]


@pytest.mark.parametrize("power", [0.0, 1.0, -0.5])
def test_the_loss_is_the_mean_over_completion_tokens_weighted_by_depth(power: float) -> None:
    logits, labels = batch()
    budgets = predicting_budgets(SCHEDULE, 5)
    total = weight_sum = count = 0.0
    for row in range(3):
        for column in range(5):
            if labels[row, column] == IGNORED:
                continue
            weight = (budgets[column] / 8) ** power
            total += weight * token_loss(logits[row, column], int(labels[row, column]))
            weight_sum += weight
            count += 1
    loss = completion_loss(logits, labels, budgets, num_layers=8, depth_weight_power=power)
    assert float(loss) == pytest.approx(total / weight_sum, rel=1e-5)
    accumulated = completion_loss(logits, labels, budgets, num_layers=8, depth_weight_power=power, num_items=40)
    assert float(accumulated) == pytest.approx(total / weight_sum * count / 40, rel=1e-5)


def test_padding_has_no_gradient() -> None:
    logits, labels = batch()
    logits.requires_grad_()
    completion_loss(logits, labels, predicting_budgets(SCHEDULE, 5), num_layers=8).backward()
    assert logits.grad is not None
    assert (logits.grad[labels == IGNORED] == 0).all()
    assert (logits.grad[labels != IGNORED].abs().sum(-1) > 0).all()


def test_distillation_is_the_divergence_from_the_teacher_over_completion_tokens() -> None:
    logits, labels = batch()
    teacher = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    total, count = 0.0, 0
    for row, column in (labels != IGNORED).nonzero().tolist():
        p, q = teacher[row, column].softmax(-1).tolist(), logits[row, column].softmax(-1).tolist()
        total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        count += 1
    assert float(distillation_loss(logits, teacher, labels)) == pytest.approx(total / count, rel=1e-4)
    assert float(distillation_loss(logits, teacher, labels, num_items=40)) == pytest.approx(total / 40, rel=1e-4)
    assert float(distillation_loss(teacher, teacher, labels)) == pytest.approx(0, abs=1e-6)


def test_bands_split_the_loss_by_depth() -> None:
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


def test_a_shallow_model_has_fewer_bands_than_four() -> None:
    bands = DepthBands(2)
    assert {bands.name(bands.band(budget)) for budget in (1, 2)} == {"loss_layers_1_to_1", "loss_layers_2_to_2"}
