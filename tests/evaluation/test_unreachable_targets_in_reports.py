"""Reports mark unreachable targets, whose rows use the fastest trained schedule."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from finished_runs import predictions
from rich.console import Console
from small_checkpoints import save_checkpoint

import eval.cli
import eval.search.cli
import eval.search.trials
from eval.lineup import Plan, profile_of
from eval.report.comparison import Line
from eval.report.tables import quality_table, timing_table
from eval.results import Report
from eval.score.registry import short
from eval.systems.base import Checkpoint
from skipdecode import CostModel, SkipSchedule, load
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.schedule.machine_profile import Profile, TimedBatch, profile_setting
from skipdecode.schedule.plan import SpeedPlan
from skipdecode.timing.calibrate import Calibration, Spread

TRAINED = {
    1.0: SkipSchedule.full_depth(6, horizon=8),
    2.0: SkipSchedule(6, 4, 2, horizon=8),
    4.0: SkipSchedule(6, 3, 2, horizon=8),
}
SMALL = ["--max-new-tokens", "8", "--limit", "6", "--batch-size", "3", "--weights", "packed"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("trained") / "tiny", 6)
    config = SkipConfig.load(folder)
    assert config is not None
    SkipConfig(TRAINED, config.solver, config.task).save(folder)
    return folder


@pytest.fixture
def profile(trained: Path) -> Iterator[Profile]:
    """A profile where two layers, the fewest that were trained, are 1.92 times as fast as all, and one 2.5 times."""
    model, _ = load(str(trained))
    times = TimedBatch(3, 20, 20, {1: 1.0, 6: 2.5}, {1: 1.0, 6: 6.0}, {1: 0.0, 6: 0.0})
    found = Profile(profile_setting(model, CostModel.of(model), "packed"), 6, (times,), "2026-01-02")
    path = found.save()
    yield found
    path.unlink()


def planned(found: Profile) -> float:
    cost = found.at(batch_size=3, prompt_length=20)
    return int(100 * max(cost.speedup(schedule) for schedule in TRAINED.values())) / 100


def test_an_evaluation_marks_unreachable_targets_in_every_table_and_strict_refuses_them(
    trained: Path, profile: Profile, tmp_path: Path, capsys: Any
) -> None:
    own = tmp_path / "fastest.json"
    own.write_text(TRAINED[4.0].to_json())
    output = tmp_path / "out"
    words = ["--checkpoint", str(trained), "--speedup", "1.5", "3", "--lossless", "3", "--schedule", str(own), *SMALL]
    assert eval.cli.main([*words, "--output", str(tmp_path / "strict"), "--strict"]) == 2
    error = capsys.readouterr().err
    assert "error: speedup is 3: this checkpoint reaches at most 1.92 by the calibrated profile of 2026" in error
    assert not (tmp_path / "strict").exists() or not list((tmp_path / "strict").glob("*.json*"))
    assert eval.cli.main([*words, "--output", str(output)]) == 0
    mark = f"3x (planned {planned(profile):.2f}x)"
    said = capsys.readouterr()
    assert said.err.count("warning: at batch 3, speedup 3 can't be reached: the fastest schedule that this") == 1
    report = Report.load(output / "report.json")
    by_label = {row.label: row for row in report.rows}
    assert by_label["3x"].planned_speedup == by_label["lossless-3x"].planned_speedup == planned(profile)
    assert by_label["3x"].schedule == by_label["lossless-3x"].schedule == TRAINED[4.0].to_dict()
    assert by_label["1.5x"].planned_speedup is by_label["1x"].planned_speedup is None
    assert predictions(output, "3x") == predictions(output, "fastest")
    assert predictions(output, "lossless-3x") == predictions(output, "1x")
    markdown = (output / "report.md").read_text()
    assert markdown.count(mark) == 2, "in the table, and in that by batch size"
    assert (
        f"Some targets can't be reached by {report.clock}; the fastest schedule that the checkpoint was trained for "
        f"was used instead: 3x: planned {planned(profile):.2f}x at batch 3; "
        f"lossless-3x: planned {planned(profile):.2f}x at batch 3."
    ) in markdown
    line = Line("tiny", "tiny", str(trained), report.over, report.rows[0], tuple(report.rows), ())
    timed = timing_table(line)
    assert timed is not None
    for table in (quality_table(line, short(report.rows[0].scores)), timed):
        assert mark in table.to_markdown()
    older = json.loads((output / "report.json").read_text())
    for row in older["rows"]:
        del row["planned_speedup"]
        for timing in row["timings"]:
            del timing["planned_speedup"]
    assert Report.of(older).rows[2].planned_speedup is None


def test_a_plan_survives_a_round_trip_through_the_journal() -> None:
    missed = SpeedPlan(TRAINED[2.0], 4.0, 1.5, 2.0, "a clock")
    plans = {3: {1.0: SpeedPlan(TRAINED[1.0], 1.0, 1.0, None, "a clock"), 4.0: missed}}
    plan = Plan("packed", plans, {}, "a clock")
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert plan.warnings() == [f"at batch 3, {missed.warning()}"]


def test_a_search_for_an_unreachable_target_uses_the_speed_of_the_fastest_trained_schedule(
    trained: Path, profile: Profile, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval.search.trials, "MIN_PROMPTS", 5)
    words = ["--checkpoint", str(trained), "--speedup", "3", "--trials", "3", *SMALL]
    assert eval.search.cli.main([*words, "--output", str(tmp_path / "strict"), "--strict"]) == 2
    assert "speedup is 3: this checkpoint reaches at most 1.92" in capsys.readouterr().err
    assert eval.search.cli.main([*words, "--output", str(tmp_path / "found")]) == 0
    assert "warning: speedup 3 can't be reached: the fastest schedule that this" in capsys.readouterr().err
    report = json.loads((tmp_path / "found" / "search.json").read_text())
    assert (report["target"], report["planned_speedup"]) == ("3x", planned(profile))
    default = next(row for row in report["trials"] if row["trial"] == 0)
    assert default["schedule"] == TRAINED[4.0].to_dict()
    assert all(row["predicted_speedup"] >= default["predicted_speedup"] for row in report["trials"])
    markdown = (tmp_path / "found" / "search.md").read_text()
    assert "3x can't be reached on this machine: the default is the fastest schedule that the" in markdown


def test_a_disturbed_calibration_during_an_evaluation_prints_a_warning(
    trained: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    model, tokenizer = load(str(trained))
    warning = "warning: the rounds disagree by up to 40% (batch size 3, prompt length 20)"
    for share, said in ((0.4, warning), (0.04, "")):
        measured = Calibration(profile, (Spread(3, 20, share),))
        monkeypatch.setattr("eval.lineup.measure_profile", lambda *_, measured=measured, **__: measured)
        checkpoint = Checkpoint(str(trained), model, tokenizer, "packed")
        found = profile_of(checkpoint, SkipConfig(), (3,), [[5, 6]], Console(width=200), calibrate=True)
        assert found is profile
        out = capsys.readouterr().out
        assert out.startswith(said)
        assert bool(out) == bool(said)
