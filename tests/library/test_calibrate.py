"""A calibrated schedule is solved from times that were measured, and from nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import ragged_prompts, tiny_opt
from transformers import OPTConfig, StoppingCriteriaList

from skipdecode import ConfigError, MeasuredCost, SkipSchedule, measure_cost, skip_generate, solve_schedule
from skipdecode.calibrate import share_outside_layers
from skipdecode.clock import StepClock


@given(st.integers(2, 40), st.floats(1e-4, 1), st.floats(0, 1), st.data())
def test_between_measured_depths_time_is_a_straight_line(depth, layer, fixed, data):
    middle = data.draw(st.sets(st.integers(1, depth), max_size=4))
    cost = MeasuredCost(depth, {n: fixed + n * layer for n in {1, depth} | middle})
    for layers in range(1, depth + 1):
        assert cost.step_seconds(layers, step=0) == pytest.approx(fixed + layers * layer)


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


@given(st.integers(2, 40), st.floats(0.001, 0.1), st.floats(0, 0.5), st.randoms(use_true_random=False))
def test_the_share_outside_layers_is_found_on_a_busy_machine(depth, layer, outside, randoms):
    """Every repeat runs at a speed of its own, and in two of five one depth took three times as long."""
    depths = sorted({1 + round(i * (depth - 1) / 7) for i in range(8)})
    stairs = []
    for repeat in range(10):
        drift = randoms.uniform(1, 2)
        times = {n: drift * (outside + n * layer) for n in depths}
        if repeat % 5 < 2 and len(depths) > 2:
            times[randoms.choice(depths)] *= 3
        stairs.append(times)
    assert share_outside_layers(stairs, depth) == pytest.approx(outside / (outside + depth * layer), abs=1e-6)


def test_a_share_that_noise_puts_below_nothing_is_nothing() -> None:
    assert share_outside_layers([{1: 0.5, 4: 4.0}], 4) == 0


@pytest.mark.parametrize("layers", [2, 6, 12])
def test_measuring_gives_a_line_over_all_depths_and_leaves_the_model_as_it_was(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is one of which each step takes 3 ms, and 2 ms a layer."""
    budgets: list[list[int]] = []
    decode = skip_generate

    def decoded(model, *args, schedule, **kwargs):
        budgets.append([schedule.budget(i) for i in range(schedule.horizon)])
        return decode(model, *args, schedule=schedule, **kwargs)

    class Clock(StepClock):
        @property
        def step_seconds(self):
            assert self.steps == len(budgets[-1])
            return [0.003 + 0.002 * budget for budget in budgets[-1]]

    monkeypatch.setattr("skipdecode.calibrate.skip_generate", decoded)
    monkeypatch.setattr("skipdecode.calibrate.StepClock", Clock)
    model = tiny_opt("opt", layers).train()
    try:
        cost = measure_cost(model, batch_size=2, prompt_length=500, repeats=2, tread=3)  # it has 96 positions
        assert model.training
    finally:
        model.eval()
    assert cost.num_layers == layers
    assert len(budgets) == 3
    for depth in range(1, layers + 1):
        assert cost.step_seconds(depth, step=0) == pytest.approx(0.003 + 0.002 * depth)


def test_a_model_of_one_layer_has_nothing_to_measure() -> None:
    with pytest.raises(ConfigError, match="the model has 1 layer"):
        measure_cost(tiny_opt("opt", 1))


def test_a_cost_in_which_layers_hardly_matter_bounds_the_target() -> None:
    with pytest.raises(ConfigError, match=r"reaches at most 1\.50"):
        solve_schedule(MeasuredCost(6, {1: 1.0, 6: 1.5}), 2.0)


@pytest.mark.parametrize("given", ["outputs/run", OPTConfig()])
def test_what_is_no_model_is_not_measured(given: object) -> None:
    with pytest.raises(ConfigError, match=f"{type(given).__name__} is not a transformers model"):
        measure_cost(given)  # type: ignore[arg-type]


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
