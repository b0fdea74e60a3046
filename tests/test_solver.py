"""The cost model counts what a step touches, and the solver meets its target by it."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_opt
from transformers import AutoConfig

from skipdecode import ConfigError, CostModel, Machine, SkipSchedule, load, measure_cost, solve_schedule

OPT_1_3B = CostModel(
    num_layers=24,
    layer_parameters=50_358_272,
    head_parameters=102_957_056,
    other_parameters=4096,
    embedding_values=4096,
    cache_values=4096,
    value_bytes=2,
)


def test_sizes_of_opt_1_3b_are_read_from_its_config() -> None:
    config = AutoConfig.for_model(
        "opt",
        hidden_size=2048,
        word_embed_proj_dim=2048,
        num_hidden_layers=24,
        ffn_dim=8192,
        num_attention_heads=32,
        dtype=torch.bfloat16,
    )
    cost = CostModel.of(config)
    # By hand: four projections and two feed-forward matrices with biases, two layer norms; the tied head.
    hidden, inner = 2048, 8192
    assert cost.layer_parameters == 4 * (hidden * hidden + hidden) + 2 * hidden * inner + inner + hidden + 4 * hidden
    assert cost.head_parameters == 50272 * hidden
    assert cost == OPT_1_3B


@pytest.mark.parametrize("kind", ["opt", "opt-350m"])
def test_a_model_and_its_config_cost_the_same_and_all_parameters_are_counted(kind: str) -> None:
    model = tiny_opt(kind, 5)
    cost = CostModel.of(model)
    assert cost == CostModel.of(model.config)
    embeddings = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding))
    counted = 5 * cost.layer_parameters + cost.other_parameters + embeddings  # the head is the embedding
    assert counted == sum(p.numel() for p in model.parameters())


@given(
    speedup=st.floats(1.01, 8.5),
    horizon=st.integers(1, 128),
    spread=st.floats(0, 1),
    batch=st.integers(1, 64),
    prompt=st.integers(1, 1000),
)
def test_a_solved_schedule_is_never_predicted_slower_than_its_target(
    speedup: float, horizon: int, spread: float, batch: int, prompt: int
) -> None:
    settings = {"horizon": horizon, "prompt_length": prompt, "batch_size": batch}
    floor = SkipSchedule(24, 1, 1, horizon=horizon)
    reachable = OPT_1_3B.at(prompt_length=prompt, batch_size=batch).speedup(floor)
    if speedup > reachable:
        with pytest.raises(ConfigError, match="reaches at most"):
            solve_schedule(OPT_1_3B, speedup, spread=spread, **settings)
        return
    schedule = solve_schedule(OPT_1_3B, speedup, spread=spread, **settings)
    predicted = OPT_1_3B.at(prompt_length=prompt, batch_size=batch).speedup(schedule)
    assert predicted >= speedup
    # The target can't be had with a whole layer more.
    if schedule.max_layers < 24:
        slower = SkipSchedule(24, schedule.max_layers + 1, schedule.min_layers + 1, horizon=horizon)
        assert OPT_1_3B.at(prompt_length=prompt, batch_size=batch).speedup(slower) < speedup


def test_the_prediction_equals_adding_up_every_step() -> None:
    schedule = SkipSchedule(24, 12, 4, horizon=10)
    machine = Machine(bytes_per_second=1e11, operations_per_second=1e13)
    batch, prompt = 4, 30

    def seconds(layers: int, context: int) -> float:
        weights = layers * 50_358_272 + 102_957_056 + 4096
        cached = layers * 4096 * (context + 1)
        read = 2 * (weights + batch * (4096 + cached)) / 1e11
        computed = 2 * batch * (weights + cached) / 1e13
        return max(read, computed)

    full = sum(seconds(24, prompt + i) for i in range(10))
    skipped = sum(seconds(schedule.budget(i), prompt + i) for i in range(10))
    predicted = OPT_1_3B.at(prompt_length=prompt, batch_size=batch, machine=machine).speedup(schedule)
    assert predicted == pytest.approx(full / skipped)


def test_the_head_makes_a_target_dearer_than_layers_alone() -> None:
    schedule = solve_schedule(OPT_1_3B, 5, horizon=64)
    assert schedule.mean_budget(64) < 24 / 5 - 1


@given(speedup=st.floats(1.01, 8.5), horizon=st.integers(1, 128), spread=st.floats(0, 1))
def test_a_constant_budget_is_one_number_and_the_largest_that_is_fast_enough(
    speedup: float, horizon: int, spread: float
) -> None:
    """Else it would fall at the end of the horizon, for all that comes after it."""
    schedule = solve_schedule(OPT_1_3B, speedup, horizon=horizon, spread=spread, decay="constant")
    layers = schedule.max_layers
    assert schedule.min_layers == layers
    assert OPT_1_3B.at().speedup(schedule) >= speedup
    if layers < 24:
        assert OPT_1_3B.at().speedup(SkipSchedule(24, layers + 1, layers + 1, horizon=horizon)) < speedup


def test_a_target_of_one_is_full_depth() -> None:
    assert solve_schedule(OPT_1_3B, 1, horizon=9) == SkipSchedule.full_depth(24, horizon=9)


def test_a_target_out_of_reach_names_the_largest_that_is_reached() -> None:
    with pytest.raises(ConfigError) as caught:
        solve_schedule(OPT_1_3B, 50)
    found = re.search(r"reaches at most ([\d.]+)", str(caught.value))
    assert found
    assert solve_schedule(OPT_1_3B, float(found[1])).max_layers == 1
    with pytest.raises(ConfigError, match="reaches at most"):
        solve_schedule(OPT_1_3B, float(found[1]) + 0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speedup": 0.5}, "speedup is 0.5"),
        ({"speedup": float("nan")}, "speedup is nan"),
        ({"speedup": 2, "spread": 1.5}, "spread is 1.5"),
        ({"speedup": 2, "batch_size": 0}, "batch_size is 0"),
        ({"speedup": 2, "decay": "linaer"}, "did you mean 'linear'"),
        ({"speedup": 2, "batch_size": 1.5}, "batch_size is 1.5: it must be an integer of at least 1"),
        ({"speedup": 2, "prompt_length": "64"}, "prompt_length is '64': it must be an integer of at least 1"),
    ],
)
def test_a_bad_target_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        solve_schedule(OPT_1_3B, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"batch_size": 0}, {"prompt_length": -1}, {"repeats": True}])
def test_a_calibration_refuses_counts_below_one(change: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(change))} is .*: it must be an integer of at least 1"):
        measure_cost(tiny_opt("opt", 2), **change)  # type: ignore[arg-type]


def test_a_checkpoint_without_a_name_is_refused() -> None:
    for name in (None, "", 5):
        with pytest.raises(ConfigError, match="the checkpoint's name is"):
            load(name)  # type: ignore[arg-type]
