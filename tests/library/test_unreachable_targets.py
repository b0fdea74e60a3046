"""Targets that a machine can't reach are decoded with the fastest trained schedule, or refused if strict."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_checkpoints import save_checkpoint
from starlette.testclient import TestClient
from tiny_models import tiny_opt

import skipdecode
from skipdecode import ConfigError, CostModel, Engine, MeasuredCost, SkipSchedule, skip_generate, solve_schedule
from skipdecode.checkpoint.remote_code import write_custom_generate
from skipdecode.checkpoint.skip_config import SkipConfig, save_default_speedup
from skipdecode.cli.options import main
from skipdecode.generate import remote_entry as hub
from skipdecode.generate.fast_path import fast_path
from skipdecode.generate.skip_generate import resolve_plan
from skipdecode.schedule.machine_profile import Profile, TimedBatch, profile_setting
from skipdecode.schedule.plan import PLANNED_HEADER, rounded_down
from skipdecode.schedule.solver import OutOfReachError
from skipdecode.serve import main as run
from skipdecode.serve.app import make_app
from skipdecode.serve.settings import ServeSettings
from skipdecode.timing import calibrate
from skipdecode.timing.calibrate import measure_profile

DEPTH = 6
PROFILE = "the calibrated profile of 2026-01-02"
TRAINED = {
    1.0: SkipSchedule.full_depth(DEPTH, horizon=8),
    2.0: SkipSchedule(DEPTH, 4, 2, horizon=8),
    3.0: SkipSchedule(DEPTH, 3, 1, horizon=8),
    4.0: SkipSchedule(DEPTH, 2, 1, horizon=8),
}
FASTEST = TRAINED[4.0]
PROMPT = "vehicle: ferry | to: Saltfern\n"
REACH = 1.93  # the speedup of a single layer, by the profile below


def profile_of(model: Any, reach: float = REACH) -> Profile:
    """A profile in which a step of one layer is `reach` times as fast as one of all, and nothing else takes time."""
    times, nothing = {1: 1.0, DEPTH: reach}, {1: 0.0, DEPTH: 0.0}
    return profile_with(model, TimedBatch(1, 64, 72, times, {1: 1e-9, DEPTH: 1e-9}, nothing))


def profile_with(model: Any, *batches: TimedBatch) -> Profile:
    setting = profile_setting(model, CostModel.of(model), fast_path(model).usual_weights())
    return Profile(setting, DEPTH, batches, "2026-01-02")


def planned(reach: float = REACH) -> float:
    """The speedup of the fastest trained schedule by that profile, over its horizon."""
    step = 1 + (reach - 1) / (DEPTH - 1) * (sum(FASTEST.budget(i) for i in range(8)) / 8 - 1)
    return rounded_down(reach / step)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("trained") / "tiny", DEPTH)
    SkipConfig(TRAINED, {"horizon": 8}, {"name": "departures", "example": PROMPT}).save(folder)
    write_custom_generate(folder)
    save_default_speedup(folder, 3.0)
    return folder


@pytest.fixture
def slow_machine(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Profile]:
    """Save a profile of the checkpoint by which at most 1.93x can be reached, and forget earlier warnings."""
    monkeypatch.setattr("skipdecode.generate.skip_generate._WARNED", set())
    found = profile_of(skipdecode.load(str(trained))[0])
    path = found.save()
    yield found
    path.unlink()


@pytest.fixture
def warned() -> Iterator[list[str]]:
    logger, handler = logging.getLogger("transformers.skipdecode"), logging.Handler()
    lines: list[str] = []
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def inputs_of(tokenizer: Any) -> dict[str, Any]:
    return {**tokenizer(PROMPT, return_tensors="pt"), "max_new_tokens": 8, "do_sample": False}


@given(
    st.dictionaries(st.sampled_from([1.0, 1.5, 2.0, 3.0, 4.0]), st.integers(1, 12), min_size=1),
    st.floats(1, 12),
    st.floats(0, 40),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_plan_has_the_trained_or_solved_schedule_or_for_an_unreachable_target_the_fastest_trained(
    budgets: dict[float, int], target: float, fixed: float, warmup: int, measured: bool
) -> None:
    schedules = {
        speedup: SkipSchedule(12, 12 if speedup == 1 else max(warmup, budget), warmup, warmup, horizon=8)
        for speedup, budget in budgets.items()
    }
    config = SkipConfig(schedules, {"horizon": 8, "warmup_layers": warmup})
    cost = MeasuredCost(12, {1: fixed + 1, 12: fixed + 12})
    batch = TimedBatch(1, 64, 72, cost.seconds_by_layers, {1: 1.0, 12: 1.0}, {1: 0.0, 12: 0.0})
    profile = Profile({}, 12, (batch,), "2026-01-02") if measured else None
    how: Any = {"over": "decode", "profile": profile}
    plan = config.plan_for(cost, target, **how)
    found, limit = None, 0.0
    if target in schedules and (profile is None or target == 1 or set(schedules) - {1.0} == {target}):
        found = schedules[target]
    else:
        try:
            trained = {12} | {each.budget(i) for each in schedules.values() for i in range(9)}
            if trained == {12}:  # full depth alone, as with exits after any layer
                trained = set(range(1, 13))
            found = solve_schedule(cost, target, horizon=8, warmup_layers=warmup, budgets=trained)
        except OutOfReachError as error:
            limit = error.limit
    if found is None:
        assert not plan.reached
        assert plan.schedule in schedules.values()
        speeds = [cost.speedup(each) for each in schedules.values()]
        assert plan.speedup == cost.speedup(plan.schedule) == max(speeds) < target
        assert plan.limit == max(limit, rounded_down(max(speeds))) <= target
        with pytest.raises(ConfigError, match=f"speedup is {target:g}: this checkpoint reaches at most .* by "):
            config.plan_for(cost, target, strict=True, **how)
        return
    assert plan.schedule == found
    assert plan.speedup is not None
    if plan.reached:
        assert plan.planned is not None
        assert plan.planned >= rounded_down(target) - 1e-9
        assert config.plan_for(cost, target, strict=True, **how) == plan
    else:  # a checkpoint with a single trained schedule, which misses its target by the profile
        assert profile is not None
        assert found == config.schedules[target]
        assert plan.speedup == cost.speedup(found) < target


def test_a_checkpoint_without_trained_schedules_refuses_an_unreachable_target() -> None:
    cost = MeasuredCost(DEPTH, {1: 1.0, DEPTH: REACH})
    with pytest.raises(OutOfReachError, match=r"this model reaches at most 1\.93"):
        SkipConfig(solver={"horizon": 8}).plan_for(cost, 3.0)


def test_old_names_of_plans_and_checkpoints_warn_and_give_what_the_new_names_give() -> None:
    cost = MeasuredCost(DEPTH, {1: 1.0, DEPTH: REACH})
    config = SkipConfig(TRAINED, {"horizon": 8})
    plan = config.plan_for(cost, 3.5)
    assert plan.fallback_speedup == plan.planned == planned()
    renamed = [(plan, "shortfall", "fallback_speedup"), (plan, "clock", "predicted_by")]
    for owner, old, new in [*renamed, (config, "texts", "lengths_by_prompt")]:
        with pytest.warns(DeprecationWarning, match=f"{old} is deprecated: use {new}"):
            assert getattr(owner, old) == getattr(owner, new)
    with pytest.warns(DeprecationWarning, match="schedule_for is deprecated: use plan_for"):
        assert config.schedule_for(cost, 2.0) == config.plan_for(cost, 2.0).schedule
    with pytest.warns(DeprecationWarning, match="schedule_for"), pytest.raises(OutOfReachError):
        config.schedule_for(cost, 3.5)


def test_generate_uses_the_fastest_trained_schedule_for_an_unreachable_target_and_warns_once(
    trained: Path, slow_machine: Profile, warned: list[str]
) -> None:
    model, tokenizer = skipdecode.load(str(trained))
    inputs = inputs_of(tokenizer)
    expected = model.generate(**inputs, custom_generate=skip_generate, schedule=FASTEST)
    for _ in range(2):
        found = model.generate(**inputs, custom_generate=skip_generate, speedup=3)
        assert torch.equal(found, expected)
    longer = {**inputs, **tokenizer(PROMPT * 2, return_tensors="pt")}
    model.generate(**longer, custom_generate=skip_generate, speedup=3)
    assert warned == [
        "speedup 3 can't be reached: the fastest schedule that this checkpoint was trained for is used instead, "
        f"{planned():.2f}x by {PROFILE}"
    ]
    model.generate(**inputs, custom_generate=skip_generate, speedup=40)
    assert len(warned) == 2, "no second warning that 40x lies outside of the trained range"
    with pytest.raises(ConfigError, match=rf"speedup is 3: this checkpoint reaches at most 1\.93 by {PROFILE}; choose"):
        model.generate(**inputs, custom_generate=skip_generate, speedup=3, strict=True)
    model.generate(**inputs, custom_generate=skip_generate, speedup=1.5, strict=True)
    with pytest.raises(ConfigError, match="strict is 'yes': it must be True or False"):
        model.generate(**inputs, custom_generate=skip_generate, speedup=3, strict="yes")
    assert len(warned) == 2


def test_lossless_decoding_drafts_with_the_fastest_trained_schedule_for_an_unreachable_target(
    trained: Path, slow_machine: Profile, warned: list[str]
) -> None:
    model, tokenizer = skipdecode.load(str(trained))
    inputs = inputs_of(tokenizer)
    found = model.generate(**inputs, custom_generate=skip_generate, speedup=3, lossless=True)
    assert torch.equal(found, model.generate(**inputs))
    assert len(warned) == 1
    with pytest.raises(ConfigError, match=r"reaches at most 1\.93"):
        model.generate(**inputs, custom_generate=skip_generate, speedup=3, lossless=True, strict=True)


@pytest.mark.parametrize("carried", [False, True])
def test_a_checkpoints_own_code_does_the_same_also_at_its_default_speedup(
    trained: Path, slow_machine: Profile, warned: list[str], carried: bool
) -> None:
    model, tokenizer = skipdecode.load(str(trained))
    inputs = inputs_of(tokenizer)

    def decoded(**how: Any) -> torch.Tensor:
        if carried:
            return model.generate(**inputs, custom_generate=str(trained), trust_remote_code=True, **how)
        found: torch.Tensor = hub.generate(model=model, **inputs, **how)
        return found

    expected = model.generate(**inputs, custom_generate=skip_generate, schedule=FASTEST)
    for how in ({}, {"speedup": 3}, {"speedup": 3}):  # its default speedup is 3x
        assert torch.equal(decoded(**how), expected)
    assert len(warned) == 1
    with pytest.raises(ValueError, match=r"reaches at most 1\.93.*\(at the checkpoint's own speed, 3x"):
        decoded(strict=True)
    model.generation_config.default_speedup = None
    assert torch.equal(decoded(strict=True), model.generate(**inputs))


def test_an_engines_answers_have_their_plans(trained: Path, slow_machine: Profile) -> None:
    model, tokenizer = skipdecode.load(str(trained))
    prompt = tokenizer(PROMPT)["input_ids"]
    with Engine(model) as engine:
        answers = [engine.submit(prompt, speedup=speedup, max_new_tokens=8) for speedup in (3, 1.5)]
        plans = [answer.plan for answer in answers]
        assert [plan is not None and plan.reached for plan in plans] == [False, True]
        assert answers[0].schedule == FASTEST
        assert plans[0] is not None
        assert (plans[0].target, plans[0].fallback_speedup) == (3.0, planned())
        expected = model.generate(**inputs_of(tokenizer), custom_generate=skip_generate, schedule=FASTEST)
        assert [each.token for each in answers[0]] == expected[0, len(prompt) :].tolist()
        with pytest.raises(ConfigError, match=r"reaches at most 1\.93"):
            engine.submit(prompt, speedup=3, strict=True, max_new_tokens=8)
        lossless = engine.submit(prompt, speedup=3, lossless=True, max_new_tokens=8)
        assert lossless.plan is None


def test_a_checkpoint_with_a_single_trained_schedule_plans_the_speedup_that_the_profile_predicts(
    trained: Path, slow_machine: Profile
) -> None:
    model, _ = skipdecode.load(str(trained))
    model.config.skipdecode = SkipConfig({1.0: TRAINED[1.0], 3.0: FASTEST}, {"horizon": 8}).to_dict()
    plan = resolve_plan(model, None, 3.0)
    assert (plan.schedule, plan.reached, plan.planned) == (FASTEST, False, planned())
    model.config.skipdecode = SkipConfig({3.0: FASTEST}).to_dict()  # an export, which doesn't know the complete depth
    assert resolve_plan(model, None, 3.0).planned == 3.0


def test_commands_decode_show_and_refuse_unreachable_targets_likewise(
    trained: Path, slow_machine: Profile, warned: list[str], capsys: Any
) -> None:
    name, words = str(trained), [PROMPT.replace("\n", "\\n"), "--max-new-tokens", "8"]
    assert main(["generate", name, *words, "--speedup", "4"]) == 0
    text = capsys.readouterr().out
    model, tokenizer = skipdecode.load(name)
    ids = model.generate(**inputs_of(tokenizer), custom_generate=skip_generate, schedule=FASTEST)
    prompt = tokenizer(PROMPT)["input_ids"]
    assert text == tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True) + "\n"
    assert len(warned) == 1
    assert main(["compare", name, *words, "--speedup", "1.5", "3", "--repeats", "1"]) == 0
    out = capsys.readouterr().out
    assert f"3x (planned {planned():.2f}x)" in out
    assert out.splitlines()[-1].startswith("planned: this target can't be reached")
    assert main(["info", name]) == 0
    out = capsys.readouterr().out
    for target in (2, 3, 4):
        assert f"{target}x (planned {planned():.2f}x)  2 to 1 of 6" in out
    capsys.readouterr()
    for command in (["generate", name, *words], ["compare", name, *words], ["info", name]):
        assert main([*command, "--speedup", "3", "--strict"]) == 2
        captured = capsys.readouterr()
        assert not captured.out or command[0] == "info"
        assert captured.err.splitlines()[-1].startswith("error: speedup is 3: this checkpoint reaches at most 1.93")


def test_a_strict_command_refuses_a_later_batch_before_it_prints_the_output_of_an_earlier_one(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    model, tokenizer = skipdecode.load(str(trained))
    short, long = PROMPT, PROMPT * 3
    ends = [len(tokenizer(each)["input_ids"]) for each in (short, long)]
    nothing = {1: 0.0, DEPTH: 0.0}
    batches = (
        TimedBatch(1, columns, columns, {1: 1.0, DEPTH: reach}, {1: 1.0, DEPTH: 1.0}, nothing)
        for columns, reach in zip(ends, (5.0, 1.2), strict=True)
    )
    path = profile_with(model, *batches).save()
    try:
        words = [text.replace("\n", "\\n") for text in (short, long)]
        command = ["generate", str(trained), "--speedup", "2", "--max-new-tokens", "4", "--batch-size", "1", "--strict"]
        assert main([*command, words[0]]) == 0
        assert capsys.readouterr().out
        assert main([*command, *words]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "error: speedup is 2" in captured.err
    finally:
        path.unlink()


def test_an_export_for_an_unreachable_target_has_the_fastest_trained_schedule(
    trained: Path, tmp_path: Path, capsys: Any
) -> None:
    folder = save_checkpoint(tmp_path / "tiny", DEPTH)
    slow, fast = (replace(TRAINED[speedup], prompt="max") for speedup in (2.0, 4.0))
    SkipConfig({2.0: slow, 4.0: fast}, {"horizon": 8, "prompt": "max"}).save(folder)
    path = profile_of(skipdecode.load(str(folder))[0]).save()
    try:
        assert main(["export", str(folder), str(tmp_path / "strict"), "--speedup", "3", "--strict"]) == 2
        assert "reaches at most 1.93" in capsys.readouterr().err
        assert not (tmp_path / "strict").exists()
        assert main(["export", str(folder), str(tmp_path / "small"), "--speedup", "3"]) == 0
        assert "2 of 6 layers, " in (out := capsys.readouterr().out)
        assert f"for 3x (planned {planned():.2f}x) only" in out
    finally:
        path.unlink()


@pytest.fixture
def client(trained: Path, slow_machine: Profile) -> Iterator[Any]:
    model, tokenizer = skipdecode.load(str(trained))
    engine = Engine(model, tokenizer)
    with TestClient(make_app(engine, tokenizer, ServeSettings("tiny", speedup=3))) as found:
        yield found


def test_a_server_decodes_unreachable_targets_and_reports_the_planned_speedup(client: Any, trained: Path) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["speedup"], model["planned_speedup"]) == (3.0, planned())
    assert client.get("/v1/models/tiny").json() == model
    page = client.get("/").text
    known = json.loads(page.partition('id="known">')[2].partition("</script>")[0])
    assert (known["speedup"], known["fastest"]) == (1.75, 1.75), "the largest multiple of 0.25 that can be reached"
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8}
    for more, target in (({}, 3.0), ({"speedup": 4}, 4.0)):
        answer = client.post("/v1/completions", json={**asked, **more})
        assert answer.status_code == 200
        assert answer.headers[PLANNED_HEADER] == f"{planned():.2f}"
        assert answer.json()["skipdecode"] == {"speedup": target, "planned_speedup": planned()}
    details = client.post("/v1/completions", json={**asked, "details": True}).json()["skipdecode"]
    assert details["planned_speedup"] == planned()
    assert 1 <= details["layers_per_token"] <= 2
    for more in ({}, {"details": True}):
        streamed = client.post("/v1/completions", json={**asked, "stream": True, **more})
        assert streamed.headers[PLANNED_HEADER] == f"{planned():.2f}"
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert events
        assert all(event["skipdecode"]["planned_speedup"] == planned() for event in events)
    reached = client.post("/v1/completions", json={**asked, "speedup": 1.5})
    assert float(reached.headers[PLANNED_HEADER]) >= 1.5
    full = client.post("/v1/completions", json={**asked, "speedup": 1})
    assert full.json()["skipdecode"] == {"speedup": 1, "planned_speedup": 1}
    lossless = client.post("/v1/completions", json={**asked, "lossless": True})
    assert PLANNED_HEADER not in lossless.headers
    assert lossless.json()["skipdecode"]["planned_speedup"] is None


def test_a_strict_server_refuses_unreachable_targets_in_requests_and_at_its_start(
    trained: Path, slow_machine: Profile, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    model, tokenizer = skipdecode.load(str(trained))
    engine = Engine(model, tokenizer)
    with TestClient(make_app(engine, tokenizer, ServeSettings("tiny", strict=True))) as client:
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8}
        refused = client.post("/v1/completions", json={**asked, "speedup": 3})
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert message.startswith(f"speedup is 3: this checkpoint reaches at most 1.93 by {PROFILE}")
        assert client.post("/v1/completions", json={**asked, "speedup": 1.5}).status_code == 200
    assert main(["serve", str(trained), "--speedup", "3", "--strict", "--port", "0"]) == 2
    assert "error: speedup is 3" in capsys.readouterr().err
    monkeypatch.setattr(run._Server, "run", lambda *_, **__: None)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    assert main(["serve", str(trained), "--speedup", "3", "--port", "0"]) == 0
    assert f"at 3x (planned {planned():.2f}x by {PROFILE}: 2 to 1 of 6 layers per token" in capsys.readouterr().err


def rounds_of(factors: list[float], monkeypatch: pytest.MonkeyPatch) -> calibrate.Calibration:
    """The calibration where a step takes a second per layer, multiplied in each round by its factor."""
    calls = 0
    model: Any = tiny_opt("opt", DEPTH)
    in_a_round = len({1, *(max(1, round(share * DEPTH)) for share in calibrate.DEPTHS)})

    def timed(_: object, depth: int, rows: int, columns: int, ___: object, steps: int, **____: object) -> Any:
        nonlocal calls
        factor = [1.0, *factors][min(calls // (2 * in_a_round + 3), len(factors))]  # the first round is a warm-up
        calls += 1
        return 1.0, factor * steps * depth

    monkeypatch.setattr(calibrate, "_time_call", timed)
    return measure_profile(model, batch_sizes=[1], prompt_lengths=[8], weights="model", repeats=len(factors))


def test_calibrate_warns_only_where_its_rounds_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = rounds_of([1.0, 1.02, 0.99, 1.01, 1.0, 3.0, 1.0, 1.01], monkeypatch)
    assert quiet.spreads[0].share < 0.05, "one slow round of eight is an outlier"
    assert quiet.warning() is None
    busy = rounds_of([1.0, 1.4, 1.1, 1.6, 1.0, 1.5, 1.2, 1.3], monkeypatch)
    assert busy.spreads[0].share > 0.2
    assert str(busy.warning()).startswith("the rounds disagree by up to ")
    assert "(batch size 1, prompt length 8)" in str(busy.warning())
    assert rounds_of([1.0], monkeypatch).warning() is None


def test_skipdecode_calibrate_shows_the_spread_and_warns(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ["calibrate", str(trained), "--batch-size", "1", "--prompt-length", "7", "--repeats", "1"]
    spreads = iter([0.04, 0.4])
    monkeypatch.setattr(calibrate, "_spread", lambda *_: next(spreads))
    assert main(command) == 0
    quiet = capsys.readouterr()
    assert quiet.out.splitlines()[0].split()[-1] == "spread"
    assert quiet.out.splitlines()[1].split()[-1] == "4%"
    assert "warning" not in quiet.err
    assert main(command) == 0
    assert "warning: the rounds disagree by up to 40% (batch size 1, prompt length 7)" in capsys.readouterr().err
