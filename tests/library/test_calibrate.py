"""Calibration measures times, and schedules are solved from these times."""

import copy
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import ragged_prompts, tiny_opt
from transformers import GenerationConfig, OPTConfig, StoppingCriteriaList

from skipdecode import ConfigError, CostModel, MeasuredCost, SkipSchedule, measure_cost, skip_generate, solve_schedule
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.generate.skip_generate import resolve_plan
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.lengths import Lengths
from skipdecode.schedule.machine_profile import Profile, TimedBatch, find_profile, profile_setting, profiles_folder
from skipdecode.timing import calibrate
from skipdecode.timing.calibrate import measure_profile, relative_times
from skipdecode.timing.step_clock import StepClock


@given(st.integers(2, 40), st.floats(1e-4, 1), st.floats(0, 1), st.data())
def test_step_time_is_linear_between_measured_depths(depth, layer, fixed, data):
    middle = data.draw(st.sets(st.integers(1, depth), max_size=4))
    cost = MeasuredCost(depth, {n: fixed + n * layer for n in {1, depth} | middle})
    for layers in range(1, depth + 1):
        assert cost.step_seconds(layers, step=0) == pytest.approx(fixed + layers * layer)


@given(st.floats(1.2, 6.0), st.floats(0.0, 3.0))
def test_a_schedule_solved_with_measured_times_reaches_its_target_closely(speedup, fixed):
    cost = MeasuredCost(24, {1: fixed + 1, 24: fixed + 24})  # a step of n layers takes fixed + n
    reachable = (fixed + 24) / (fixed + 1)
    if speedup > reachable:
        with pytest.raises(ConfigError, match=r"reaches at most"):
            solve_schedule(cost, speedup)
        return
    schedule = solve_schedule(cost, speedup)
    step = sum(fixed + schedule.budget(i) for i in range(64)) / 64
    needed = (fixed + 24) / speedup
    # Never slower; faster by no more than half a layer, the resolution of mean budgets, and the solver's tolerance.
    assert needed / 1.03 - 0.55 < step <= needed * (1 + 1e-9)


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=5, unique=True), st.randoms(use_true_random=False))
def test_relative_times_are_exact_on_a_busy_machine(seconds, randoms):
    """Every repeat runs at its own speed, and in two of five repeats one depth takes three times as long."""
    stairs = dict(enumerate(sorted(seconds), start=1))
    repeats = []
    for repeat in range(10):
        drift = randoms.uniform(1, 2)
        times = {n: drift * taken for n, taken in stairs.items()}
        if repeat % 5 < 2:
            times[randoms.choice(list(stairs))] *= 3
        repeats.append(times)
    full = len(stairs)
    units = [times[full] for times in repeats]
    assert relative_times(repeats, units) == pytest.approx({n: taken / stairs[full] for n, taken in stairs.items()})


def test_relative_times_never_decrease_with_the_number_of_layers() -> None:
    assert relative_times([{1: 0.5, 4: 0.4, 6: 2.0}], [2.0]) == {1: 0.25, 4: 0.25, 6: 1.0}


@pytest.mark.parametrize("layers", [2, 6, 12])
def test_measure_cost_finds_the_times_of_a_simulated_clock_and_leaves_the_model_unchanged(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 3 ms and 2 ms per layer; the startup of decoding takes 7 ms and 5 ms per layer. In a prefill, deeper
    layers take longer, and those above a stop take 0.3 of that, plus a step's time for the last token.
    """
    ran: list[SkipSchedule] = []
    decode = skip_generate

    def prefill(depth: int) -> float:
        return 0.01 + 0.001 * depth**2

    def decoded(model, *args, schedule, **kwargs):
        ran.append(schedule)
        return decode(model, *args, schedule=schedule, **kwargs)

    class Clock(StepClock):
        @property
        def decode_seconds(self):
            depth = ran[-1].max_layers
            assert depth == ran[-1].min_layers
            # Deeper prompts leave other layers in the processor's caches.
            cold = 0.004 * (ran[-1].prompt_budget - depth)
            return 0.007 + 0.005 * depth + cold + self.steps * (0.003 + 0.002 * depth)

        @property
        def prefill_seconds(self):
            stop, full = ran[-1].prompt_depth, ran[-1].prompt_budget
            return prefill(stop) + 0.3 * (prefill(full) - prefill(stop)) + 0.002 * (full - stop)

    monkeypatch.setattr("skipdecode.timing.calibrate.skip_generate", decoded)
    monkeypatch.setattr("skipdecode.timing.step_clock.StepClock", Clock)
    model = tiny_opt("opt", layers).train()
    try:
        cost = measure_cost(model, batch_size=2, prompt_length=500, repeats=2, steps=3)  # it has 96 positions
        assert model.training
    finally:
        model.eval()
    assert cost.num_layers == layers
    for depth in range(1, layers + 1):
        assert cost.step_seconds(depth, step=0) == pytest.approx(0.003 + 0.002 * depth)
        for prompt in range(1, layers + 1):
            cold = 0.004 * max(0, prompt - depth)
            assert cost.start_seconds(depth, prompt) == pytest.approx(0.007 + 0.005 * depth + cold)
    assert cost.stopped_share == pytest.approx(0.3)
    for depth in {schedule.max_layers for schedule in ran}:
        assert cost.prefill_seconds(depth) == pytest.approx(prefill(depth))


def test_startup_time_is_measured_again_for_prompts_that_are_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(_: object, depth: int, __: int, columns: int, ___: object, steps: int, **____: object) -> Any:
        return 1.0, columns + steps * depth

    monkeypatch.setattr(calibrate, "_time_call", timed)
    found = measure_profile(tiny_opt("opt", 6), batch_sizes=[2], prompt_lengths=[20, 30, 60], repeats=1).profile
    starts = {20: 20, 30: 20, 60: 60}
    assert {batch.prompt_length: batch.start[3] for batch in found.batches} == pytest.approx(starts)
    assert {batch.prompt_length: batch.step[3] for batch in found.batches} == pytest.approx({20: 3, 30: 3.5, 60: 3})


def test_prompts_longer_than_the_models_positions_are_neither_run_nor_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ran = tiny_opt("opt", 2), set()  # of 96 positions
    generate = type(model).generate

    def generating(self: Any, input_ids: torch.Tensor, **request: Any) -> Any:
        ran.add(input_ids.shape[1])
        return generate(self, input_ids=input_ids, **request)

    monkeypatch.setattr(type(model), "generate", generating)
    found = measure_profile(model, batch_sizes=[1, 1], prompt_lengths=[38, 76, 92, 95], repeats=1).profile
    assert [(batch.batch_size, batch.prompt_length) for batch in found.batches] == [(1, 38), (1, 76)]
    assert ran == {38, 76}


def test_a_model_of_few_positions_is_measured_with_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_opt.__wrapped__("opt", 2)
    monkeypatch.setattr(model.config, "max_position_embeddings", 16)
    assert measure_cost(model, repeats=1).num_layers == 2
    (batch,) = measure_profile(model, batch_sizes=[1], prompt_lengths=[40], repeats=1).profile.batches
    assert (batch.prompt_length, batch.context) == (1, 8)
    monkeypatch.setattr(model.config, "max_position_embeddings", 5)
    with pytest.raises(ConfigError, match="the model has 5 positions: timing its steps needs at least 6"):
        measure_cost(model, repeats=1)


def test_the_cache_state_left_by_another_batch_does_not_influence_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill and the steps of the first two calls of a batch take ten times as long."""
    before: list[tuple[int, int]] = []

    def timed(_: object, depth: int, rows: int, columns: int, ____: object, steps: int, **_____: object) -> Any:
        cold = 10 if before[-2:] != [(rows, columns)] * 2 else 1
        before.append((rows, columns))
        return cold * depth * columns, cold * steps * depth

    monkeypatch.setattr(calibrate, "_time_call", timed)
    found = measure_profile(tiny_opt("opt", 6), batch_sizes=[1, 4], prompt_lengths=[10, 30], repeats=8).profile
    for batch in found.batches:
        assert batch.step == pytest.approx({n: n for n in batch.step})
        assert batch.prefill == pytest.approx({n: n * batch.prompt_length for n in batch.prefill})


@given(st.integers(1, 4096))
def test_a_profile_uses_the_batchs_prompt_lengths_and_the_cost_model_only_unusual_ones(tokens: int) -> None:
    config = SkipConfig(solver={"horizon": 12, "lengths": [[9, 1]], "prompt_lengths": [[60, 1]]})
    batches = [[tokens, 1], [tokens]]
    measured = config.conditions_at_hand(batches, measured=True)
    assert abs(measured["prompt_length"] - tokens) <= 0.5 + 0.045 * tokens
    mean = (2 * tokens + 1) / 3  # the second prompt of the first batch is padded
    assert abs(measured["prompt_tokens"] - mean) <= 0.5 + 0.045 * mean
    analytical = config.conditions_at_hand(batches).get("prompt_length")
    assert (analytical is None) == (30 <= tokens <= 120)
    assert analytical is None or 2**-0.51 <= analytical / tokens <= 2**0.51


TIMED = [
    TimedBatch(1, 40, 50, {1: 1.0, 6: 3.5}, {1: 2.0, 6: 7.0}, {1: 0.5, 6: 1.0}, 0.4, cold=0.3),
    TimedBatch(8, 40, 50, {1: 2.0, 6: 9.5}, {1: 9.0, 6: 44.0}, {1: 1.2, 6: 2.4}, cold=0.7),
    TimedBatch(1, 400, 410, {1: 1.5, 6: 6.5}, {1: 11.0, 6: 61.0}, {1: 0.5, 6: 1.0}),
    TimedBatch(8, 400, 410, {1: 4.0, 6: 18.5}, {1: 88.0, 6: 480.0}, {1: 1.2, 6: 2.4}, 0.2),
]


def profile(model: Any, weights: Weights) -> Profile:
    sizes = CostModel.of(model)
    return Profile(profile_setting(model, sizes, weights), sizes.num_layers, tuple(TIMED), "2026-01-02")


@pytest.fixture
def kept() -> Iterator[None]:
    """Removes the profiles that a test stores."""
    yield
    shutil.rmtree(profiles_folder(), ignore_errors=True)


def test_times_are_interpolated_between_measured_batches() -> None:
    timed = profile(tiny_opt("opt", 6), "model")
    cost = timed.at(batch_size=3, prompt_length=40, expected_steps=Lengths.of([5]).expected_steps(3))
    assert cost.step_seconds(6, 0) == pytest.approx(3.5 + 2 / 7 * 6)
    assert cost.step_seconds(1, 0, rows=1) == 1.0, "of the remaining sequence"
    assert cost.start_seconds(6, 6) == pytest.approx(1 + 2 / 7 * 1.4)
    assert cost.start_seconds(1, 6) - cost.start_seconds(1, 1) == pytest.approx(0.3 + 2 / 7 * 0.4)
    assert cost.prefill_seconds(6) == pytest.approx(7 + (120 - 40) / (320 - 40) * 37)
    more = timed.at(batch_size=16, prompt_length=40)
    assert more.step_seconds(6, 0) == 9.5, "as for the largest measured batch"
    assert timed.at(batch_size=16, prompt_length=400).prefill_seconds(1) == pytest.approx(88 * 2)
    assert timed.at(batch_size=1, prompt_length=2).prefill_seconds(1) == 2.0
    padded = timed.at(batch_size=8, prompt_length=400, prompt_tokens=40)
    assert padded.prefill_seconds(6) == pytest.approx(44.0)
    assert padded.step_seconds(6, 10) == pytest.approx(18.5)
    few, many = (timed.at(batch_size=rows, prompt_length=300) for rows in (1, 8))
    least = timed.at(batch_size=1, prompt_length=50)
    assert (least.stopped_share, few.stopped_share, many.stopped_share) == (0.4, 1, 0.2)
    stopped = SkipSchedule(6, 6, 6, prompt_stop=1)
    steps = many.step_seconds(6, 0) - many.step_seconds(1, 0)
    between = many.prefill_seconds(6) - many.prefill_seconds(1)
    assert many.prompt_seconds(stopped) == pytest.approx(many.prefill_seconds(1) + 0.2 * between + steps)


def test_step_time_is_interpolated_between_measured_context_lengths() -> None:
    timed = profile(tiny_opt("opt", 6), "model")
    for rows, few, many in ((1, 3.5, 6.5), (8, 9.5, 18.5)):
        for prompt, step in ((50, 0), (50, 90), (140, 0), (140, 180), (320, 0), (50, 360), (320, 90), (2, 0), (9, 999)):
            context = min(max(50, prompt + step), 410)
            found = timed.at(batch_size=rows, prompt_length=prompt).step_seconds(6, step)
            assert found == pytest.approx(few + (context - 50) / 360 * (many - few))
    assert timed.at(batch_size=8, prompt_length=230).step_seconds(6, 0, rows=1) == pytest.approx(5.0)


def test_predicted_decode_time_is_right_if_steps_become_slower_with_every_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(layers: int, rows: int, columns: int) -> float:
        return layers * (1 + 0.02 * rows * columns)

    def timed_call(_: Any, depth: int, rows: int, columns: int, __: Any, steps: int, **___: Any) -> Any:
        return columns * rows * depth, sum(step(depth, rows, columns + i) for i in range(steps))

    monkeypatch.setattr(calibrate, "_time_call", timed_call)
    model = tiny_opt.__wrapped__("opt", 6)
    timed = measure_profile(model, batch_sizes=[1, 4], prompt_lengths=[10, 30, 90], repeats=1).profile
    for rows, prompt, steps in ((1, 20, 50), (4, 20, 50), (4, 25, 7), (1, 60, 40), (4, 41, 1)):
        cost = timed.at(batch_size=rows, prompt_length=prompt)
        schedule = SkipSchedule(6, 5, 2, horizon=40)
        for each in (schedule, SkipSchedule.full_depth(6)):
            took = sum(step(each.budget(i), rows, prompt + i) for i in range(steps))
            assert cost.decode_seconds(each, steps) == pytest.approx(took, rel=0.03)
        assert cost.prefill_seconds(6) == pytest.approx(rows * prompt * 6)


def test_a_schedule_solved_with_a_profile_keeps_a_safety_margin_above_the_target() -> None:
    timed = profile(tiny_opt("opt", 6), "model").at(batch_size=8, prompt_length=60)
    exact = replace(timed, margin=1.0)
    plain = solve_schedule(exact, 2, horizon=30)
    asked = exact.speedup(plain) / 1.01  # which it reaches, and not with so much to spare
    assert solve_schedule(exact, asked, horizon=30) == plain != solve_schedule(timed, asked, horizon=30)
    assert exact.speedup(solve_schedule(timed, asked, horizon=30)) >= 1.03 * asked
    most = exact.speedup(SkipSchedule(6, 1, 1, horizon=30))
    assert solve_schedule(timed, most, horizon=30).max_layers == 1, "the highest reachable target is reached"
    with pytest.raises(ConfigError, match=f"speedup is {most + 0.01:g}: .* reaches at most"):
        solve_schedule(timed, most + 0.01, horizon=30)


def test_startup_time_counts_once_and_only_if_there_is_a_step() -> None:
    cost = MeasuredCost(6, {1: 1.0, 6: 6.0}, start={1: 10.0, 6: 60.0})
    schedule = SkipSchedule(6, 3, 1, horizon=5)
    steps = [schedule.budget(i) for i in range(4)]
    assert cost.decode_seconds(schedule, 4) == pytest.approx(30 + sum(steps))
    sequences = replace(cost, expected_steps=Lengths.of([1, 3]).expected_steps(1))  # half of them take two steps
    assert sequences.decode_seconds(schedule) == pytest.approx(0.5 * (30 + sum(steps[:2])))
    assert replace(cost, expected_steps=()).decode_seconds(schedule) == 0


def test_a_speedup_is_solved_with_the_stored_profile_or_else_with_the_analytical_cost_model(kept: None) -> None:
    model = tiny_opt.__wrapped__("opt", 6)
    lengths, prompts = [[9, 4], [20, 1]], [[6, 1]]
    config = SkipConfig(solver={"horizon": 12, "lengths": lengths, "prompt_lengths": prompts})
    model.config.skipdecode = config.to_dict()
    ids, mask = ragged_prompts([6, 6, 6], 0)
    request: Any = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    request |= {"custom_generate": skip_generate, "eos_token_id": None, "weights": "model"}

    def solved(over: Any) -> tuple[SkipSchedule, torch.Tensor]:
        found = resolve_plan(model, None, 1.5, over=over, weights="model", prompts=[6, 6, 6]).schedule
        output = model.generate(**request, speedup=1.5, over=over)
        assert torch.equal(output, model.generate(**request, schedule=found))
        return found, output

    analytical = CostModel.of(model).at(batch_size=3, prompt_lengths=prompts, lengths=lengths)
    before = solved("decode")
    assert before[0] == solve_schedule(analytical, 1.5, horizon=12)
    timed = profile(model, "model")
    path = timed.save()
    assert Profile.load(path) == timed
    measured = timed.at(batch_size=3, prompt_length=6, expected_steps=Lengths.read(lengths).expected_steps(3))
    for over in ("decode", "all"):
        assert solved(over)[0] == solve_schedule(measured, 1.5, horizon=12, over=over)
    assert solved("decode")[0] != before[0], "the profile must differ from the cost model"
    # It is valid for these weights and threads only.
    for name, value in (("weights", "packed"), ("threads", 99), ("num_layers", 7), ("dtype", "bfloat16")):
        assert find_profile({**timed.setting, name: value}) is None
    path.unlink()
    assert solved("decode")[0] == before[0]


@pytest.mark.parametrize(
    "damage",
    [
        *("", "[]", "{}", '{"format": 9}', '{"format": 4, "batches": []}'),
        *({"batches": []}, {"num_layers": 7}, {"num_layers": None}, {"date": {}}, {"setings": {}}),
    ],
)
def test_a_damaged_profile_is_refused_by_name(kept: None, damage: str | dict[str, Any]) -> None:
    timed = profile(tiny_opt("opt", 6), "model")
    path = timed.save()
    changed = {**json.loads(path.read_text()), **damage} if isinstance(damage, dict) else None
    path.write_text(str(damage) if changed is None else json.dumps(changed))
    with pytest.raises(ConfigError, match=f"the profile {path} can't be read .*: remove it, and run skipdecode cal"):
        find_profile(timed.setting)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0),
        ("prompt_length", None),
        ("context", "40"),
        ("step", {"1": -1, "6": 2}),
        ("prefill", {"6": 2}),
        ("stopped_share", 1.5),
        ("cold", -1),
        ("step", {"1": 1, "3": 2, "6": 3}),
        ("start", {"1": 1, "5": 2}),
    ],
)
def test_a_profile_with_an_invalid_value_is_refused_by_name(kept: None, field: str, value: Any) -> None:
    timed = profile(tiny_opt("opt", 6), "model")
    path = timed.save()
    content = json.loads(path.read_text())
    content["batches"][1][field] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"the profile {path} can't be read"):
        find_profile(timed.setting)


def test_a_profile_contains_every_batch_and_can_be_stored(kept: None) -> None:
    model = tiny_opt("opt", 2)
    seen: list[None] = []
    sizes: Any = {"batch_sizes": [1, 2], "prompt_lengths": [5, 9], "weights": "model", "repeats": 1}
    timed = measure_profile(model, **sizes, advance=lambda: seen.append(None)).profile
    assert [(b.batch_size, b.prompt_length) for b in timed.batches] == [(1, 5), (2, 5), (1, 9), (2, 9)]
    assert len(seen) == 2, "a repeat and the warm-up"
    assert all(seconds > 0 for b in timed.batches for seconds in (*b.step.values(), *b.prefill.values()))
    assert all(seconds >= 0 for b in timed.batches for seconds in b.start.values())
    assert not profiles_folder().exists()
    timed.save()
    assert find_profile(profile_setting(model, CostModel.of(model), "model")) == timed


def test_the_models_own_generation_config_does_not_influence_the_measurement() -> None:
    model = copy.deepcopy(tiny_opt("opt", 2))
    own = GenerationConfig(num_beams=4, max_time=1e-3, use_cache=False, repetition_penalty=1.3, stop_strings=["a"])
    model.generation_config = own
    timed = measure_profile(model, batch_sizes=[1], prompt_lengths=[5], weights="model", repeats=1).profile
    assert all(seconds > 0 for seconds in timed.batches[0].step.values())
    assert model.generation_config is own


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), RuntimeError("no home directory")])
def test_an_unreadable_home_directory_holds_no_profile_and_refuses_to_store_one(
    kept: None, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_opt("opt", 2)
    timed = measure_profile(model, batch_sizes=[1], prompt_lengths=[5], weights="model", repeats=1).profile

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise error

    for name in ("is_dir", "mkdir"):
        monkeypatch.setattr(Path, name, refuse)
    assert find_profile(timed.setting) is None
    with pytest.raises(ConfigError, match=r"the profile can't be saved: .*XDG_CACHE_HOME"):
        timed.save()


def test_a_model_of_one_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model has 1 layer"):
        measure_cost(tiny_opt("opt", 1))


@pytest.mark.parametrize("given", ["outputs/run", OPTConfig()])
def test_measuring_something_else_than_a_model_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=f"{type(given).__name__} is not a transformers model"):
        measure_cost(given)  # type: ignore[arg-type]


def test_the_step_clocks_step_times_add_up_to_its_decode_time() -> None:
    clock = StepClock(torch.device("cpu"))
    ids, mask = ragged_prompts([4, 4], 0)
    request = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "schedule": SkipSchedule(6, 3, 1)}
    request |= {"custom_generate": skip_generate, "stopping_criteria": StoppingCriteriaList([clock])}
    tiny_opt("opt", 6).generate(ids, attention_mask=mask, **request)
    assert clock.steps == len(clock.step_seconds) == 5
    assert clock.decode_seconds == pytest.approx(sum(clock.step_seconds))
    assert clock.prefill_seconds > 0


def test_the_time_of_a_long_sequence_is_not_distorted_by_slow_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(0)

    def timed(_: object, depth: int, __: int, ___: int, ____: object, steps: int, **_____: object) -> Any:
        seconds = steps * (1 + 2 * depth)
        return 1.0, seconds * generator.uniform(1.2, 1.4) if steps == calibrate.SHORT else seconds

    monkeypatch.setattr(calibrate, "_time_call", timed)
    cost = measure_cost(tiny_opt("opt", 6), repeats=3, steps=40)
    for layers in (1, 3, 6):
        at_once = cost.decode_seconds(SkipSchedule(6, layers, layers), calibrate.SHORT + 40)
        assert at_once == pytest.approx(44 * (1 + 2 * layers), rel=0.05)
    far = cost.decode_seconds(SkipSchedule(6, 1, 1), 440)
    assert far < 0.99 * 440 * 3, "the error of the short sequence is multiplied in one that is ten times as long"
