"""Runs whose targets are solved by a calibrated profile."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import SMALL, train_small

from skipdecode import ConfigError, SkipSchedule
from skipdecode.checkpoint.loading import load_model
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.cli.options import main
from skipdecode.generate.fast_path import fast_path
from skipdecode.schedule.cost import MACHINES, CostModel, PredictedCost
from skipdecode.schedule.machine_profile import Profile, TimedBatch, profile_setting
from train.build import build_task
from train.prepare import Prepared, make_arguments, prepare
from train.recipe import load_recipe

DEPTH = 8
CHANGES = [*SMALL, "schedule.speedups=[1,2,3]", "schedule.decay=constant", "schedule.prompt=max", "schedule.over=all"]


def prepared(folder: Path, *changes: str) -> Prepared:
    recipe = load_recipe("quickstart", [*CHANGES, *changes, f"output.dir={folder}"])
    return prepare(recipe, build_task(recipe), make_arguments(recipe, folder))


def a_profile(model: object) -> Profile:
    """The profile of a machine that takes one second per layer and one for the rest, for any batch."""
    seconds = {1: 2.0, 4: 5.0, DEPTH: 1.0 + DEPTH}
    batches = tuple(TimedBatch(rows, 40, 50, seconds, seconds, dict.fromkeys(seconds, 0.0)) for rows in (1, 8))
    setting = profile_setting(model, CostModel.of(model), "model")  # type: ignore[arg-type]
    return Profile(setting, DEPTH, batches, "2030-01-01")


def test_targets_are_solved_by_the_given_profile(tmp_path: Path) -> None:
    without = prepared(tmp_path / "one")
    profile = a_profile(without.model)
    profile.save(tmp_path / "machine.json")
    found = prepared(tmp_path / "one", f"schedule.profile={tmp_path / 'machine.json'}")
    assert found.profile == profile
    cost = found.skip_config.cost_for(found.cost, profile=profile)
    for speedup, schedule in zip(found.sampler.speedups, found.sampler.schedules, strict=True):
        if speedup == 1:
            continue
        # The largest number of layers that is fast enough with a margin of 3 %.
        expected = max(n for n in range(1, DEPTH + 1) if (1 + DEPTH) / (1 + n) >= speedup * 1.03)
        assert schedule.max_layers == schedule.min_layers == expected
        one_more = SkipSchedule(DEPTH, expected + 1, expected + 1, decay="constant", prompt="max")
        assert cost.speedup(one_more, over="all") < speedup * 1.03
    assert found.sampler.schedules != without.sampler.schedules, "the analytical cost model says otherwise"


def test_a_resumed_run_keeps_its_profile(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    a_profile(prepared(tmp_path / "one").model).save(file)
    settings = ["train.max_steps=1", "schedule.texts=0", f"schedule.profile={file}"]
    folder = train_small(tmp_path / "run", *CHANGES[len(SMALL) :], *settings)
    kept = Profile.load(folder / "profile.json")
    assert kept == Profile.load(file)
    config = SkipConfig.load(folder)
    assert config is not None
    other = replace(kept, date="2031-01-01")
    (tmp_path / "other").mkdir()
    other.save(tmp_path / "other" / "profile.json")
    assert prepared(tmp_path / "other", f"schedule.profile={file}").profile == other
    assert prepared(tmp_path / "new", f"schedule.profile={file}").skip_config.schedules == config.schedules


def test_profile_auto_uses_this_machines_profile_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    without = prepared(tmp_path / "one", "schedule.profile=auto")
    assert without.profile is None
    cpu = without.skip_config.cost_for(without.cost)
    assert isinstance(cpu, PredictedCost)
    assert cpu.machine == MACHINES["cpu"], "this test trains on a CPU"
    for speedup, schedule in zip(without.sampler.speedups, without.sampler.schedules, strict=True):
        assert cpu.speedup(schedule, over="all") >= speedup
    assert SkipConfig.from_dict(without.skip_config.to_dict()).cost_for(without.cost) == cpu, "as it decodes later"

    weights = fast_path(without.model).usual_weights()
    setting = profile_setting(without.model, CostModel.of(without.model), weights)
    profile = replace(a_profile(without.model), setting=setting)
    profile.save()
    assert prepared(tmp_path / "one", "schedule.profile=auto").profile == profile
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "recipe.yaml").touch()
    assert prepared(tmp_path / "begun", "schedule.profile=auto").profile is None, "a run that began without one"


def test_an_unusable_profile_is_refused(tmp_path: Path) -> None:
    profile = a_profile(prepared(tmp_path / "one").model)
    with pytest.raises(ConfigError, match=r"schedule\.profile 'nowhere\.json': no such file"):
        prepared(tmp_path / "one", "schedule.profile=nowhere.json")
    (tmp_path / "damaged.json").write_text("{")
    with pytest.raises(ConfigError, match=r"the profile .*damaged\.json can't be read"):
        prepared(tmp_path / "one", f"schedule.profile={tmp_path / 'damaged.json'}")
    replace(profile, setting={**profile.setting, "layer_parameters": 7}).save(tmp_path / "other.json")
    with pytest.raises(ConfigError, match=r"is for another model: its layer_parameters is 7, but this model's is \d+"):
        prepared(tmp_path / "one", f"schedule.profile={tmp_path / 'other.json'}")


def test_training_reads_the_file_that_calibrate_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = train_small(tmp_path / "run", *CHANGES[len(SMALL) :], "train.max_steps=1", "schedule.texts=0")
    file = tmp_path / "machine.json"
    words = ["calibrate", str(folder), "--batch-size", "1", "--prompt-length", "8", "--repeats", "1"]
    assert main([*words, "--output", str(file)]) == 0
    assert f"written to {file}" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()
    profile = Profile.load(file)
    model = load_model(str(folder))
    assert profile.setting == profile_setting(model, CostModel.of(model), profile.setting["weights"])
    assert main([*words, "--output", str(file)]) == 2
    assert "machine.json exists already: name a new file" in capsys.readouterr().err
    assert json.loads(file.read_text())["format"]
