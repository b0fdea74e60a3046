"""A calibrated schedule is solved from times that were measured, and from nothing else."""

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

from skipdecode import (
    ConfigError,
    CostModel,
    MeasuredCost,
    SkipSchedule,
    measure_cost,
    skip_generate,
    solve_schedule,
)
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.generate.skip_generate import resolve_plan
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.lengths import Lengths
from skipdecode.schedule.machine_profile import Profile, TimedBatch, find_profile, profiles_folder, setting_of
from skipdecode.timing import calibrate
from skipdecode.timing.calibrate import measure_profile, relative_times
from skipdecode.timing.step_clock import StepClock


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


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=5, unique=True), st.randoms(use_true_random=False))
def test_depths_are_told_apart_on_a_busy_machine(seconds, randoms):
    """Every repeat runs at a speed of its own, and in two of five one depth took three times as long."""
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


def test_more_layers_that_noise_makes_faster_take_as_long() -> None:
    assert relative_times([{1: 0.5, 4: 0.4, 6: 2.0}], [2.0]) == {1: 0.25, 4: 0.25, 6: 1.0}


@pytest.mark.parametrize("layers", [2, 6, 12])
def test_measuring_gives_a_line_over_all_depths_and_leaves_the_model_as_it_was(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is one of which each step takes 3 ms, and 2 ms a layer, and each text 7 ms once, and 5 ms a layer; of
    prompts deep layers take longer, and those above a stop 0.3 of it, but for the last token, which takes a step's.
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
            cold = 0.004 * (ran[-1].prompt_budget - depth)  # what deeper prompts leave in caches is no use
            return 0.007 + 0.005 * depth + cold + self.steps * (0.003 + 0.002 * depth)

        @property
        def prefill_seconds(self):
            stop, most = ran[-1].prompt_depth, ran[-1].prompt_budget
            return prefill(stop) + 0.3 * (prefill(most) - prefill(stop)) + 0.002 * (most - stop)

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
    depths = {2: [1, 2], 6: [1, 2, 3, 4, 6], 12: [1, 2, 3, 4, 6, 8, 12]}[layers]
    turns = [depths, depths[::-1], depths[1:] + depths[:1]]
    runs = [n for turn in turns for n in (turn[-1], *turn, layers, *turn, 1)]
    assert [schedule.max_layers for schedule in ran] == runs
    assert cost.stopped_share == pytest.approx(0.3)
    for depth in depths:
        assert cost.prefill_seconds(depth) == pytest.approx(prefill(depth))


def test_what_decoding_takes_once_is_told_apart_behind_prompts_that_are_twice_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def timed(_: object, depth: int, __: int, columns: int, ___: object, steps: int, **____: object) -> Any:
        return 1.0, columns + steps * depth

    monkeypatch.setattr(calibrate, "_time_text", timed)
    found = measure_profile(tiny_opt("opt", 6), batch_sizes=[2], prompt_lengths=[20, 30, 60], repeats=1).profile
    starts = {20: 20, 30: 20, 60: 60}
    assert {batch.prompt_length: batch.start[3] for batch in found.batches} == pytest.approx(starts)
    assert {batch.prompt_length: batch.step[3] for batch in found.batches} == pytest.approx({20: 3, 30: 3.5, 60: 3})


def test_prompts_that_a_model_has_no_positions_for_are_neither_run_nor_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ran = tiny_opt("opt", 2), set()  # of 96 positions
    generate = type(model).generate

    def generating(self: Any, input_ids: torch.Tensor, **request: Any) -> Any:
        ran.add(input_ids.shape[1])
        return generate(self, input_ids=input_ids, **request)

    monkeypatch.setattr(type(model), "generate", generating)
    found = measure_profile(model, batch_sizes=[1, 1], prompt_lengths=[38, 76, 92, 95], repeats=1).profile
    assert [(batch.batch_size, batch.prompt_length) for batch in found.batches] == [(1, 38), (1, 76)]
    assert ran == {38, 76}


def test_a_model_of_few_positions_is_measured_over_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_opt.__wrapped__("opt", 2)
    monkeypatch.setattr(model.config, "max_position_embeddings", 16)
    assert measure_cost(model, repeats=1).num_layers == 2
    (batch,) = measure_profile(model, batch_sizes=[1], prompt_lengths=[40], repeats=1).profile.batches
    assert (batch.prompt_length, batch.context) == (1, 8)
    monkeypatch.setattr(model.config, "max_position_embeddings", 5)
    with pytest.raises(ConfigError, match="the model has 5 positions: to time its steps takes 6 at least"):
        measure_cost(model, repeats=1)


def test_what_another_batch_left_in_caches_counts_for_no_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two texts of a batch take ten times as long: their prompts, and their steps."""
    before: list[tuple[int, int]] = []

    def timed(_: object, depth: int, rows: int, columns: int, ____: object, steps: int, **_____: object) -> Any:
        cold = 10 if before[-2:] != [(rows, columns)] * 2 else 1
        before.append((rows, columns))
        return cold * depth * columns, cold * steps * depth

    monkeypatch.setattr(calibrate, "_time_text", timed)
    found = measure_profile(tiny_opt("opt", 6), batch_sizes=[1, 4], prompt_lengths=[10, 30], repeats=8).profile
    for batch in found.batches:
        assert batch.step == pytest.approx({n: n for n in batch.step})
        assert batch.prefill == pytest.approx({n: n * batch.prompt_length for n in batch.prefill})


@given(st.integers(1, 4096))
def test_a_measured_clock_counts_the_prompts_at_hand_and_bytes_those_far_from_the_training(tokens: int) -> None:
    config = SkipConfig(solver={"horizon": 12, "lengths": [[9, 1]], "prompt_lengths": [[60, 1]]})
    batches = [[tokens, 1], [tokens]]
    measured = config.conditions_at_hand(batches, measured=True)
    assert abs(measured["prompt_length"] - tokens) <= 0.5 + 0.045 * tokens
    mean = (2 * tokens + 1) / 3  # the second prompt of the first batch stands behind padding
    assert abs(measured["prompt_tokens"] - mean) <= 0.5 + 0.045 * mean
    by_bytes = config.conditions_at_hand(batches).get("prompt_length")
    assert (by_bytes is None) == (30 <= tokens <= 120)
    assert by_bytes is None or 2**-0.51 <= by_bytes / tokens <= 2**0.51


TIMED = [
    TimedBatch(1, 40, 50, {1: 1.0, 6: 3.5}, {1: 2.0, 6: 7.0}, {1: 0.5, 6: 1.0}, 0.4, cold=0.3),
    TimedBatch(8, 40, 50, {1: 2.0, 6: 9.5}, {1: 9.0, 6: 44.0}, {1: 1.2, 6: 2.4}, cold=0.7),
    TimedBatch(1, 400, 410, {1: 1.5, 6: 6.5}, {1: 11.0, 6: 61.0}, {1: 0.5, 6: 1.0}),
    TimedBatch(8, 400, 410, {1: 4.0, 6: 18.5}, {1: 88.0, 6: 480.0}, {1: 1.2, 6: 2.4}, 0.2),
]


def profile(model: Any, weights: Weights) -> Profile:
    sizes = CostModel.of(model)
    return Profile(setting_of(model, sizes, weights), sizes.num_layers, tuple(TIMED), "2026-01-02")


@pytest.fixture
def kept() -> Iterator[None]:
    """Whatever profiles a test keeps are gone after it."""
    yield
    shutil.rmtree(profiles_folder(), ignore_errors=True)


def test_a_batch_between_those_that_were_timed_lies_on_the_line_between_them() -> None:
    timed = profile(tiny_opt("opt", 6), "model")
    cost = timed.at(batch_size=3, prompt_length=40, expected_steps=Lengths.of([5]).expected_steps(3))
    assert cost.step_seconds(6, 0) == pytest.approx(3.5 + 2 / 7 * 6)
    assert cost.step_seconds(1, 0, rows=1) == 1.0, "of the row that is left"
    assert cost.start_seconds(6, 6) == pytest.approx(1 + 2 / 7 * 1.4)
    assert cost.start_seconds(1, 6) - cost.start_seconds(1, 1) == pytest.approx(0.3 + 2 / 7 * 0.4)
    assert cost.prefill_seconds(6) == pytest.approx(7 + (120 - 40) / (320 - 40) * 37)
    more = timed.at(batch_size=16, prompt_length=40)
    assert more.step_seconds(6, 0) == 9.5, "as the largest that was timed"
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


def test_a_step_behind_more_columns_lies_on_the_line_between_those_that_were_timed() -> None:
    timed = profile(tiny_opt("opt", 6), "model")
    for rows, few, many in ((1, 3.5, 6.5), (8, 9.5, 18.5)):
        for prompt, step in ((50, 0), (50, 90), (140, 0), (140, 180), (320, 0), (50, 360), (320, 90), (2, 0), (9, 999)):
            columns = min(max(50, prompt + step), 410)
            found = timed.at(batch_size=rows, prompt_length=prompt).step_seconds(6, step)
            assert found == pytest.approx(few + (columns - 50) / 360 * (many - few))
    assert timed.at(batch_size=8, prompt_length=230).step_seconds(6, 0, rows=1) == pytest.approx(5.0)


def test_texts_take_what_is_predicted_where_a_step_takes_longer_with_every_column(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(layers: int, rows: int, columns: int) -> float:
        return layers * (1 + 0.02 * rows * columns)

    def time_text(
        _: Any, depth: int, rows: int, columns: int, __: Any, steps: int, *how: Any, **more: Any
    ) -> tuple[float, float]:
        return columns * rows * depth, sum(step(depth, rows, columns + i) for i in range(steps))

    monkeypatch.setattr(calibrate, "_time_text", time_text)
    model = tiny_opt.__wrapped__("opt", 6)
    timed = measure_profile(model, batch_sizes=[1, 4], prompt_lengths=[10, 30, 90], repeats=1).profile
    for rows, prompt, steps in ((1, 20, 50), (4, 20, 50), (4, 25, 7), (1, 60, 40), (4, 41, 1)):
        cost = timed.at(batch_size=rows, prompt_length=prompt)
        schedule = SkipSchedule(6, 5, 2, horizon=40)
        for each in (schedule, SkipSchedule.full_depth(6)):
            took = sum(step(each.budget(i), rows, prompt + i) for i in range(steps))
            assert cost.decode_seconds(each, steps) == pytest.approx(took, rel=0.03)
        assert cost.prefill_seconds(6) == pytest.approx(rows * prompt * 6)


def test_a_measured_clock_is_asked_for_a_little_more_than_the_target() -> None:
    timed = profile(tiny_opt("opt", 6), "model").at(batch_size=8, prompt_length=60)
    exact = replace(timed, margin=1.0)
    plain = solve_schedule(exact, 2, horizon=30)
    asked = exact.speedup(plain) / 1.01  # which it reaches, and not with so much to spare
    assert solve_schedule(exact, asked, horizon=30) == plain != solve_schedule(timed, asked, horizon=30)
    assert exact.speedup(solve_schedule(timed, asked, horizon=30)) >= 1.03 * asked
    most = exact.speedup(SkipSchedule(6, 1, 1, horizon=30))
    assert solve_schedule(timed, most, horizon=30).max_layers == 1, "the last of what can be had is had"
    with pytest.raises(ConfigError, match=f"speedup is {most + 0.01:g}: .* reaches at most"):
        solve_schedule(timed, most + 0.01, horizon=30)


def test_what_decoding_takes_once_counts_once_and_where_there_is_a_step() -> None:
    cost = MeasuredCost(6, {1: 1.0, 6: 6.0}, start={1: 10.0, 6: 60.0})
    schedule = SkipSchedule(6, 3, 1, horizon=5)
    steps = [schedule.budget(i) for i in range(4)]
    assert cost.decode_seconds(schedule, 4) == pytest.approx(30 + sum(steps))
    texts = replace(cost, expected_steps=Lengths.of([1, 3]).expected_steps(1))  # half of them take two steps
    assert texts.decode_seconds(schedule) == pytest.approx(0.5 * (30 + sum(steps[:2])))
    assert replace(cost, expected_steps=()).decode_seconds(schedule) == 0


def test_a_speedup_is_solved_for_the_profile_that_was_kept_and_without_one_for_bytes(kept: None) -> None:
    model = tiny_opt.__wrapped__("opt", 6)
    lengths, prompts = [[9, 4], [20, 1]], [[6, 1]]
    config = SkipConfig(solver={"horizon": 12, "lengths": lengths, "prompt_lengths": prompts})
    model.config.skipdecode = config.to_dict()
    ids, mask = ragged_prompts([6, 6, 6], 0)
    request: Any = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    request |= {"custom_generate": skip_generate, "eos_token_id": None, "weights": "model"}

    def solved(over: Any) -> tuple[SkipSchedule, torch.Tensor]:
        found = resolve_plan(model, None, 1.5, over=over, weights="model", prompts=[6, 6, 6]).schedule
        text = model.generate(**request, speedup=1.5, over=over)
        assert torch.equal(text, model.generate(**request, schedule=found))
        return found, text

    by_bytes = CostModel.of(model).at(batch_size=3, prompt_lengths=prompts, lengths=lengths)
    before = solved("decode")
    assert before[0] == solve_schedule(by_bytes, 1.5, horizon=12)
    timed = profile(model, "model")
    path = timed.save()
    assert Profile.load(path) == timed
    measured = timed.at(batch_size=3, prompt_length=6, expected_steps=Lengths.read(lengths).expected_steps(3))
    for over in ("decode", "all"):
        assert solved(over)[0] == solve_schedule(measured, 1.5, horizon=12, over=over)
    assert solved("decode")[0] != before[0], "the profile's clock isn't that of bytes"
    # It is of these weights and threads alone.
    for name, value in (("weights", "packed"), ("threads", 99), ("num_layers", 7), ("dtype", "bfloat16")):
        assert find_profile({**timed.setting, name: value}) is None
    path.unlink()
    assert solved("decode")[0] == before[0]


def refuses(timed: Profile, path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the profile {path} can't be read .*: remove it, and run skipdecode cal"):
        find_profile(timed.setting)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 9}', '{"format": 4, "batches": []}'])
def test_a_damaged_profile_is_named(kept: None, content: str) -> None:
    timed = profile(tiny_opt("opt", 6), "model")
    path = timed.save()
    path.write_text(content)
    refuses(timed, path)


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
def test_a_profile_with_a_damaged_value_is_named(kept: None, field: str, value: Any) -> None:
    timed = profile(tiny_opt("opt", 6), "model")
    path = timed.save()
    content = json.loads(path.read_text())
    content["batches"][1][field] = value
    path.write_text(json.dumps(content))
    refuses(timed, path)


@pytest.mark.parametrize(
    ("field", "value"), [("batches", []), ("num_layers", 7), ("num_layers", None), ("date", {}), ("setings", {})]
)
def test_a_profile_that_is_damaged_as_a_whole_is_named(kept: None, field: str, value: Any) -> None:
    timed = profile(tiny_opt("opt", 6), "model")
    path = timed.save()
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    refuses(timed, path)


def test_a_profile_is_measured_of_every_batch_and_kept(kept: None) -> None:
    model = tiny_opt("opt", 2)
    seen: list[None] = []
    sizes: Any = {"batch_sizes": [1, 2], "prompt_lengths": [5, 9], "weights": "model", "repeats": 1}
    timed = measure_profile(model, **sizes, advance=lambda: seen.append(None)).profile
    assert [(b.batch_size, b.prompt_length) for b in timed.batches] == [(1, 5), (2, 5), (1, 9), (2, 9)]
    assert len(seen) == 2, "a repeat, and one that warms up"
    assert all(seconds > 0 for b in timed.batches for seconds in (*b.step.values(), *b.prefill.values()))
    assert all(seconds >= 0 for b in timed.batches for seconds in b.start.values())
    assert not profiles_folder().exists()
    timed.save()
    assert find_profile(setting_of(model, CostModel.of(model), "model")) == timed


def test_a_models_own_generation_config_has_no_part_in_what_is_timed() -> None:
    model = copy.deepcopy(tiny_opt("opt", 2))
    own = GenerationConfig(num_beams=4, max_time=1e-3, use_cache=False, repetition_penalty=1.3, stop_strings=["a"])
    model.generation_config = own
    timed = measure_profile(model, batch_sizes=[1], prompt_lengths=[5], weights="model", repeats=1).profile
    assert all(seconds > 0 for seconds in timed.batches[0].step.values())
    assert model.generation_config is own


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), RuntimeError("no home directory")])
def test_a_home_that_cannot_be_read_holds_no_profile_and_keeps_none(
    kept: None, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_opt("opt", 2)
    timed = measure_profile(model, batch_sizes=[1], prompt_lengths=[5], weights="model", repeats=1).profile

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise error

    for name in ("is_dir", "mkdir"):
        monkeypatch.setattr(Path, name, refuse)
    assert find_profile(timed.setting) is None
    with pytest.raises(ConfigError, match=r"the profile can't be kept: .*XDG_CACHE_HOME"):
        timed.save()


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


def test_a_text_as_long_as_those_that_were_timed_costs_what_it_took_whatever_a_short_one_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = random.Random(0)

    def timed(_: object, depth: int, __: int, ___: int, ____: object, steps: int, **_____: object) -> Any:
        seconds = steps * (1 + 2 * depth)
        return 1.0, seconds * generator.uniform(1.2, 1.4) if steps == calibrate.SHORT else seconds

    monkeypatch.setattr(calibrate, "_time_text", timed)
    cost = measure_cost(tiny_opt("opt", 6), repeats=3, steps=40)
    for layers in (1, 3, 6):
        at_once = cost.decode_seconds(SkipSchedule(6, layers, layers), calibrate.SHORT + 40)
        assert at_once == pytest.approx(44 * (1 + 2 * layers), rel=0.05)
    far = cost.decode_seconds(SkipSchedule(6, 1, 1), 440)
    assert far < 0.99 * 440 * 3, "a short text's busy moment counts ten times in one that is ten times as long"
