"""Invariants of schedules, for all schedules."""

import json
import subprocess
import sys

import pytest
from drawn_schedules import orders, schedules
from hypothesis import given
from hypothesis import strategies as st

from skipdecode import ConfigError, SkipSchedule

SCHEDULES = schedules(st.integers(1, 40), horizon=80)


@given(SCHEDULES)
def test_the_layers_of_each_token_are_a_subset_of_the_previous_tokens_layers(schedule: SkipSchedule) -> None:
    before = set(schedule.prompt_layers)
    for i in range(schedule.horizon + 3):
        layers = set(schedule.layers_at(i))
        assert layers <= before
        before = layers


@given(SCHEDULES)
def test_a_budget_lies_between_min_and_max_layers_and_is_the_number_of_layers_that_run(schedule: SkipSchedule) -> None:
    for i in range(schedule.horizon + 3):
        layers = schedule.layers_at(i)
        assert schedule.min_layers <= schedule.budget(i) == len(layers) == len(set(layers)) <= schedule.max_layers
        assert list(layers) == sorted(layers)
        assert layers[0] >= 0
        assert layers[-1] < schedule.num_layers
        assert layers[: schedule.warmup_layers] == tuple(range(schedule.warmup_layers))
        if i >= schedule.horizon - 1:
            assert schedule.budget(i) == schedule.min_layers


@given(SCHEDULES, st.integers(1, 120))
def test_cutoffs_and_mean_budget_equal_those_counted_step_by_step(schedule: SkipSchedule, n: int) -> None:
    ran = [schedule.layers_at(i) for i in range(n)]
    assert schedule.cutoffs(n) == tuple(sum(layer in layers for layers in ran) for layer in range(schedule.num_layers))
    assert schedule.mean_budget(n) == pytest.approx(sum(map(len, ran)) / n)


@given(SCHEDULES, st.integers(1, 50), st.integers(0, 80))
def test_the_positions_that_run_a_layer_are_a_prefix(schedule: SkipSchedule, prompt: int, generated: int) -> None:
    positions = prompt + generated
    cutoffs = schedule.position_cutoffs(prompt, positions)
    for layer in range(schedule.num_layers):
        runs = [layer in schedule.prompt_layers] * prompt + [layer in schedule.layers_at(i) for i in range(generated)]
        assert runs == [True] * cutoffs[layer] + [False] * (positions - cutoffs[layer])
    assert schedule.computed_share(prompt, positions) == pytest.approx(sum(cutoffs) / (positions * schedule.num_layers))


@given(SCHEDULES, st.integers(1, 50))
def test_stopped_positions_are_all_positions_of_the_prompt_but_its_last(schedule: SkipSchedule, prompt: int) -> None:
    ran = schedule.prompt_layers[: schedule.prompt_stop]
    assert schedule.prompt_depth == len(ran)
    for layer, stopped in enumerate(schedule.stopped_positions(prompt)):
        assert stopped == (prompt - 1 if layer in schedule.prompt_layers and layer not in ran else 0)


def test_a_schedule_without_prompt_stop_is_written_without_this_field() -> None:
    assert "prompt_stop" not in SkipSchedule(6, 3, 2).to_dict()


@given(SCHEDULES)
def test_a_schedule_survives_conversion_to_dict_and_json_and_back(schedule: SkipSchedule) -> None:
    again = SkipSchedule.from_json(json.dumps(json.loads(schedule.to_json())))
    assert SkipSchedule.from_dict(schedule.to_dict()) == schedule == again
    assert [again.layers_at(i) for i in range(90)] == [schedule.layers_at(i) for i in range(90)]


@given(st.integers(1, 40), st.integers(0, 39), st.integers(1, 300))
def test_linear_decay_follows_the_papers_formula(min_layers: int, extra: int, horizon: int) -> None:
    max_layers = min_layers + extra
    schedule = SkipSchedule(num_layers=max_layers, max_layers=max_layers, min_layers=min_layers, horizon=horizon)
    for i in range(horizon + 2):
        expected = min_layers if i >= horizon - 1 else round(max_layers - extra * i / (horizon - 1))
        assert schedule.budget(i) == expected


@given(SCHEDULES)
def test_top_placement_runs_the_first_w_and_the_last_k_minus_w_layers(schedule: SkipSchedule) -> None:
    top = SkipSchedule.from_dict({**schedule.to_dict(), "placement": "top", "order": None})
    depth, warmup = top.num_layers, top.warmup_layers
    for i in range(top.horizon):
        rest = top.budget(i) - warmup
        assert top.layers_at(i) == (*range(warmup), *range(depth - rest, depth))


def test_each_placement_chooses_its_own_four_of_twelve_layers() -> None:
    def layers(placement: str) -> tuple[int, ...]:
        return SkipSchedule(12, 4, 4, horizon=5, placement=placement).layers_at(0)  # type: ignore[arg-type]

    assert layers("top") == (0, 9, 10, 11)
    assert layers("bottom") == (0, 1, 2, 3)
    assert layers("ends") == (0, 1, 10, 11)
    assert layers("even") == (0, 4, 7, 11)


@given(st.data())
def test_a_budget_of_k_runs_the_first_k_layers_of_an_order(data: st.DataObject) -> None:
    depth = data.draw(st.integers(1, 30))
    min_layers = data.draw(st.integers(1, depth))
    warmup = data.draw(st.integers(1, min_layers))
    order = data.draw(orders(depth, warmup))
    schedule = SkipSchedule(depth, depth, min_layers, warmup, horizon=9, placement="order", order=order)
    for budget in range(min_layers, depth + 1):
        assert set(schedule.layers_for(budget)) == set(order[:budget])
    assert SkipSchedule.from_json(schedule.to_json()) == schedule
    assert json.loads(schedule.to_json())["order"] == list(order)


def test_every_decay_starts_at_max_layers_ends_at_min_layers_and_differs_in_between() -> None:
    def budgets(decay: str) -> list[int]:
        schedule = SkipSchedule(24, 24, 4, horizon=21, decay=decay)  # type: ignore[arg-type]
        return [schedule.budget(i) for i in (0, 5, 10, 15, 20)]

    assert budgets("linear") == [24, 19, 14, 9, 4]
    assert budgets("constant") == [24, 24, 24, 24, 4]
    assert budgets("power") == [24, 23, 19, 13, 4]
    assert budgets("cosine") == [24, 21, 14, 7, 4]
    assert budgets("exponential") == [24, 11, 6, 5, 4]
    assert budgets("step") == [24, 17, 11, 4, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"warmup_layers": 0}, "warmup_layers is 0"),
        ({"warmup_layers": 5}, "warmup_layers is 5: it must lie between 1 and min_layers"),
        ({"min_layers": 9}, "min_layers is 9: it must lie between warmup_layers"),
        ({"max_layers": 13}, "max_layers is 13: it must lie between min_layers"),
        ({"min_layers": 2.0}, "min_layers is 2.0: it must be an integer"),
        ({"horizon": 0}, "horizon is 0"),
        ({"num_layers": True}, "num_layers is True"),
        ({"decay": "linaer"}, "did you mean 'linear'"),
        ({"placement": "middle"}, "unknown placement 'middle'"),
        ({"prompt": "none"}, "unknown prompt 'none'"),
        ({"prompt": 2, "max_layers": 3}, "prompt is 2: it must lie between max_layers .3."),
        ({"prompt": 99}, "prompt is 99: it must lie between max_layers"),
        ({"prompt": True}, "prompt is True: it must be 'full', 'max', or a number"),
        ({"prompt": 9.0}, "prompt is 9.0: it must be 'full', 'max', or a number"),
        ({"decay_rate": 2.0}, "decay 'linear' takes no rate"),
        ({"decay": "power", "decay_rate": 0}, "decay_rate is 0"),
        ({"decay": "power", "decay_rate": float("nan")}, "decay_rate is nan"),
        ({"decay": "step", "decay_rate": 2.5}, "whole number of plateaus"),
        ({"decay": "power", "decay_rate": 10**400}, "at most 1000000"),
        ({"horizon": 10**9}, "horizon is 1000000000: it must be at most 1000000"),
        ({"num_layers": 10**9}, "num_layers is 1000000000: it must be at most 1000"),
        ({"placement": "order"}, "placement is 'order': it needs the field order"),
        ({"order": range(12)}, "order is given with placement 'top'"),
        ({"placement": "order", "order": range(11)}, "order has 11 layers: it must have each of the model's 12 once"),
        ({"placement": "order", "order": [0, *range(11)]}, "order lacks layer 11"),
        ({"placement": "order", "order": [0, 12, *range(2, 12)]}, "order lacks layer 1:"),
        ({"placement": "order", "order": [1, 0, *range(2, 12)]}, "order starts with 1: it must start with layer 0"),
        ({"placement": "order", "order": [0, 2, 1, *range(3, 12)], "warmup_layers": 2}, "start with layers 0 to 1, as"),
        ({"placement": "order", "order": [0.0, *range(1, 12)]}, "order is .*: it must be a list of layer indices"),
        ({"placement": "order", "order": 7}, "order is 7: it must be a list of layer indices"),
    ],
)
def test_an_invalid_field_is_refused_by_its_name(change: dict[str, object], message: str) -> None:
    fields = {"num_layers": 12, "max_layers": 8, "min_layers": 3, **change}
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        SkipSchedule(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"num_layers": 4, "max_layers": 4}', "'min_layers' is missing"),
        ('{"num_layers": 4, "max_layers": 4, "min_layres": 1}', "did you mean 'min_layers'"),
        ("[1, 2]", "expected a JSON object"),
        ("{", "not a schedule"),
        ("[" * 100_000, "nested too deeply"),
        ('{"horizon": ' + "9" * 5_000 + "}", "not a schedule"),
        ('{"decay": "power", "decay_rate": NaN}', "NaN is not a JSON number"),
        ('{"num_layers": 4, "max_layers": 4, "min_layers": 1, "max_layers": 2}', "'max_layers' occurs twice"),
    ],
)
def test_json_that_is_not_a_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SkipSchedule.from_json(text)


def test_the_schedule_module_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, skipdecode.schedule.schedule; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
