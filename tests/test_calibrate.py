"""A calibrated schedule is solved from times that were measured, and from nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import ragged_prompts, tiny_opt
from transformers import OPTConfig, StoppingCriteriaList

from skipdecode import ConfigError, CostModel, MeasuredCost, SkipSchedule, measure_cost, skip_generate, solve_schedule
from skipdecode.clock import StepClock


@given(st.integers(2, 40), st.floats(1e-4, 1), st.floats(0, 1), st.data())
def test_between_measured_depths_time_is_a_straight_line(depth, layer, fixed, data):
    middle = data.draw(st.sets(st.integers(1, depth), max_size=4))
    cost = MeasuredCost(depth, {n: fixed + n * layer for n in {1, depth} | middle})
    for layers in range(1, depth + 1):
        assert cost.step_seconds(layers, context=64) == pytest.approx(fixed + layers * layer)


@given(st.floats(1.2, 6.0), st.floats(0.0, 3.0))
def test_a_schedule_is_solved_for_the_measured_clock(speedup, fixed):
    cost = MeasuredCost(24, {1: fixed + 1, 24: fixed + 24})  # a step of n layers takes fixed + n
    reachable = (fixed + 24) / (fixed + 1)
    if speedup > reachable:
        with pytest.raises(ConfigError, match=r"reaches at most"):
            solve_schedule(cost, speedup)
        return
    schedule = solve_schedule(cost, speedup)
    step = sum(fixed + schedule.budget(i) for i in range(64)) / 64
    needed = (fixed + 24) / speedup
    # Never slower; faster by no more than half a layer, the grain of a mean of integers, and the solver's tolerance.
    assert needed / 1.03 - 0.55 < step <= needed * (1 + 1e-9)


def test_measuring_times_every_depth_of_the_staircase_and_leaves_the_model_as_it_was() -> None:
    model = tiny_opt("opt", 6).train()
    try:
        cost = measure_cost(model, batch_size=2, prompt_length=5, repeats=1, tread=3)
        assert model.training
    finally:
        model.eval()
    assert cost.num_layers == 6
    assert set(cost.seconds) == {1, 2, 3, 4, 5, 6}
    assert all(seconds > 0 for seconds in cost.seconds.values())
    deep = measure_cost(tiny_opt("opt", 12), prompt_length=500, repeats=1, tread=2)  # of 96 positions
    assert {1, 12} <= set(deep.seconds)
    assert len(deep.seconds) == 8


def test_calibrating_measures_the_model_and_refuses_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(model, **conditions):
        asked.append(conditions)
        return MeasuredCost(6, {1: 1.0, 6: 1.5})  # layers hardly matter: 2x is out of reach

    monkeypatch.setattr("skipdecode.calibrate.measure_cost", measured)
    model = tiny_opt("opt", 6)
    with pytest.raises(ConfigError, match=r"reaches at most 1\.50"):
        solve_schedule(model, 2.0, calibrate=True, batch_size=8, prompt_length=32, weights="int8")
    assert asked == [{"batch_size": 8, "prompt_length": 32, "weights": "int8"}]
    with pytest.raises(ConfigError, match="calibrate needs the model itself: a OPTConfig can't be timed"):
        solve_schedule(OPTConfig(), 2.0, calibrate=True)
    with pytest.raises(ConfigError, match="a CostModel can't be timed"):
        solve_schedule(CostModel.of(model), 2.0, calibrate=True)


def test_the_clock_counts_steps_and_their_time_adds_up() -> None:
    clock = StepClock(torch.device("cpu"))
    ids, mask = ragged_prompts([4, 4], 0)
    request = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "schedule": SkipSchedule(6, 3, 1)}
    tiny_opt("opt", 6).generate(
        input_ids=ids,
        attention_mask=mask,
        custom_generate=skip_generate,
        stopping_criteria=StoppingCriteriaList([clock]),
        **request,
    )
    assert clock.steps == len(clock.step_seconds) == 5
    assert clock.decode_seconds == pytest.approx(sum(clock.step_seconds))
    assert clock.prefill_seconds > 0
