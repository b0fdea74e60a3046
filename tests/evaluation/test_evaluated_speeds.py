"""By default a checkpoint is evaluated at its trained speedups, an exported one at its single speedup."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from finished_runs import predictions
from hypothesis import given
from hypothesis import strategies as st
from small_checkpoints import save_checkpoint

import eval.cli
from eval.loading import MAX_SPEEDUPS, evaluated_speedups
from eval.request import Request
from eval.results import Report
from skipdecode import ConfigError, SkipSchedule, load
from skipdecode.checkpoint.export import export
from skipdecode.checkpoint.skip_config import SkipConfig

SMALL = ["--max-new-tokens", "10", "--limit", "9", "--batch-size", "4"]
FALLS = SkipSchedule(6, 4, 2, horizon=6, prompt="max")
STAYS = SkipSchedule(6, 3, 3, prompt="max", decay="constant")
speeds = st.integers(4, 40).map(lambda quarters: quarters / 4)


def asked(**options: Any) -> Request:
    return Request("checkpoint", Path("out"), **options)


@given(trained=st.lists(speeds, unique=True, min_size=1, max_size=40), horizon=st.integers(1, 9))
def test_default_speedups_are_within_the_trained_range(trained: list[float], horizon: int) -> None:
    config = SkipConfig({speed: SkipSchedule.full_depth(6) for speed in trained}, {"horizon": horizon})
    found = evaluated_speedups(asked(), config)
    assert found
    assert all(min(trained) <= speed <= max(trained) for speed in found)
    assert len(found) <= MAX_SPEEDUPS
    if len(trained) <= MAX_SPEEDUPS:
        assert set(found) == set(trained)
    # Requested speedups are used; with a reference the default is the checkpoint at full depth.
    assert evaluated_speedups(asked(speedups=(1.0, 7.0)), config) == (1.0, 7.0)
    assert evaluated_speedups(asked(reference="other"), config) == (1.0,)


def test_a_checkpoint_never_trained_to_skip_is_evaluated_at_full_depth_by_default() -> None:
    assert evaluated_speedups(asked(), None) == (1.0,)
    assert evaluated_speedups(asked(), SkipConfig({1.0: SkipSchedule.full_depth(6)}, {"horizon": 8})) == (1.0,)
    exits = SkipConfig({1.0: SkipSchedule.full_depth(6)}, {"placement": "bottom", "decay": "constant"})
    assert evaluated_speedups(asked(), exits) == (1.0, 2.0, 3.0, 4.0)  # trained with exits at every layer
    assert evaluated_speedups(asked(system="calm"), None) == (1.0, 2.0, 3.0, 4.0)


@given(speed=speeds, others=st.lists(speeds, unique=True, max_size=3))
def test_an_exported_checkpoint_has_a_single_speed(speed: float, others: list[float]) -> None:
    config = SkipConfig({speed: STAYS}, {})
    assert config.exported == speed
    if tuple(others) in ((), (speed,)):
        assert evaluated_speedups(asked(speedups=tuple(others)), config) == (speed,)
    else:
        with pytest.raises(ConfigError, match=r"--speedup is \[.*was exported for .* only decodes at that speed"):
            evaluated_speedups(asked(speedups=tuple(others)), config)
    assert evaluated_speedups(asked(reference="other"), config) == (speed,)
    assert evaluated_speedups(asked(system="calm", calm_thresholds=(0.5,)), config) == (speed,)
    with pytest.raises(ConfigError, match="give thresholds with --calm-threshold"):
        evaluated_speedups(asked(system="calm"), config)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("speeds") / "whole", 6)
    config = SkipConfig.load(folder)
    assert config is not None
    replace(config, schedules={2.0: FALLS, 3.0: STAYS}, solver={"horizon": 6, "prompt": "max"}).save(folder)
    return folder


def exported(whole: Path, folder: Path, speed: float, *, standalone: bool = False) -> Path:
    model, tokenizer = load(str(whole))
    config = SkipConfig.load(whole)
    assert config is not None
    export(model, tokenizer, config.schedules[speed], speed, folder, standalone=standalone)
    return folder


def evaluate(checkpoint: Path, output: Path, *more: Any) -> Report:
    words = ["--checkpoint", checkpoint, *SMALL, *more, "--output", output]
    assert eval.cli.main([str(word) for word in words]) == 0
    return Report.load(output / "report.json")


def test_an_exported_checkpoint_is_evaluated_with_its_own_schedule(whole: Path, tmp_path: Path) -> None:
    """Also with a decaying schedule, where full depth was never trained."""
    files = [tmp_path / "falls.json", tmp_path / "stays.json"]
    for file, schedule in zip(files, (FALLS, STAYS), strict=True):
        file.write_text(schedule.to_json())
    evaluate(whole, tmp_path / "whole-eval", "--speedup", 1, "--schedule", *files)
    small = exported(whole, tmp_path / "small", 2.0)
    report = evaluate(small, tmp_path / "small-eval")
    assert [(row.label, row.num_layers, row.schedule) for row in report.rows] == [
        ("1x", 4, replace(FALLS, num_layers=4).to_dict())
    ]
    assert predictions(tmp_path / "small-eval", "1x") == predictions(tmp_path / "whole-eval", "falls")
    beside = evaluate(small, tmp_path / "beside", "--reference", whole)
    assert [(row.label, row.speedup_target, row.num_layers) for row in beside.rows] == [("1x", 1, 6), ("2x", 2, 4)]
    plain = exported(whole, tmp_path / "plain", 3.0, standalone=True)
    report = evaluate(plain, tmp_path / "plain-eval", "--task", "departures", "--task-option", "test_size=14")
    assert [(row.label, row.num_layers) for row in report.rows] == [("1x", 3)]


def test_another_speed_of_an_exported_checkpoint_is_refused(whole: Path, tmp_path: Path, capsys: Any) -> None:
    small = exported(whole, tmp_path / "small", 2.0)
    words = ["--checkpoint", str(small), *SMALL, "--speedup", "1", "2", "--output", str(tmp_path / "out")]
    assert eval.cli.main(words) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: --speedup is [1.0, 2.0]: --checkpoint {small} was exported for 2x and only decodes at that speed; "
        "leave --speedup out"
    )
    assert not (tmp_path / "out").exists()
