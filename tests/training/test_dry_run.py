"""A dry run says what a run takes, and leaves no trace of itself."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import small_runs

import train.cli
from train.build import build_task
from train.dry_run.rehearsal import dry_run
from train.prepare import make_arguments, prepare
from train.recipe import load_recipe
from train.run import run

# With dropout, whose numbers a dry run may not draw from the run's.
SMALL = [*small_runs.SMALL, "model.config.dropout=0.1", "train.max_steps=3", "tracking.wandb=offline"]
SMALL += ["data.options={train_size: 20, validation_size: 4, test_size: 4}"]


def test_a_dry_run_says_what_the_run_takes_and_writes_nothing(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, folder = tmp_path / "temporary", tmp_path / "out"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert train.cli.main(["--recipe", "quickstart", *SMALL, f"output.dir={folder}", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert not folder.exists()
    assert not list(temporary.iterdir())
    assert not Path("wandb").exists()
    for line in (
        r"parameters +2\d\d,\d{3}, of which 2\d\d,\d{3} are trained",
        r"rows +60",
        r"effective batch size +8 rows",
        r"steps +3",
        r"schedule +target 4x: (\d) to 1 of 8 layers over \d+ tokens, \1 for prompts, predicted 4\.\d+x",
        r"widest batch +\d+ columns of prompts, \d+ of completions",
        r"memory, estimated +0\.\d\d GiB",
        r"  weights +0\.00 GiB",
        r"  gradients, activations +0\.\d\d GiB",
        r"seconds a step +\d+\.\d{3}",
        r"tokens a second +[\d,]+ of completions",
        r"the whole run +about \d+\.\d\d hours",
    ):
        assert re.search(f"^{line}", printed, re.MULTILINE), line


def test_the_widest_batch_has_the_longest_prompt_and_the_longest_completion(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", [*SMALL, f"output.dir={tmp_path / 'out'}"])
    found = dry_run(recipe)
    whole = dry_run(load_recipe("quickstart", [*SMALL, "train.per_device_batch_size=60"]))
    assert (found.prompt_columns, found.new_tokens) == (whole.prompt_columns, whole.new_tokens)
    recipe = load_recipe("quickstart", [*SMALL, "train.per_device_batch_size=1", f"output.dir={tmp_path / 'out'}"])
    alone = dry_run(recipe)
    rows = prepare(recipe, build_task(recipe), make_arguments(recipe, tmp_path)).encoded.rows
    assert alone.prompt_columns + alone.new_tokens == max(rows["length"]) > len(max(rows["prompt_ids"], key=len))
    assert found.rows == 60
    assert found.seconds == pytest.approx(3 * found.seconds_a_step, rel=0.5)  # as many steps, none of them wider


def test_a_run_that_validates_is_rehearsed_without_its_validation_rows(tmp_path: Path) -> None:
    validates = ["train.validate_rows=4", "train.finish_with=best", "train.save_steps=1"]
    found = dry_run(load_recipe("quickstart", [*SMALL, *validates, f"output.dir={tmp_path / 'out'}"]))
    assert (found.rows, found.steps) == (60, 3)
    assert not (tmp_path / "out").exists()


def test_a_run_after_a_dry_run_trains_as_if_it_had_not_been_for_as_many_steps_as_it_said(tmp_path: Path) -> None:
    changes = ["train.max_steps=null", "train.epochs=1.5", "train.gradient_accumulation_steps=3", "tracking.wandb=off"]
    metrics, found = [], []
    for name in ("with", "without"):
        folder = tmp_path / name
        recipe = load_recipe("quickstart", [*SMALL, *changes, f"output.dir={folder}"])
        if name == "with":
            found.append(dry_run(recipe))
        run(recipe, name)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        metrics.append([(line["step"], line["loss"], line["grad_norm"], line["speedup_target"]) for line in lines])
    assert metrics[0] == metrics[1]
    assert found[0].rows_a_step == 24
    assert [step for step, *_ in metrics[0]] == list(range(1, found[0].steps + 1))


def test_a_dry_run_refuses_what_the_run_would(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for change, message in (
        (f"output.dir={tmp_path}", "holds files that are no run's"),
        ("schedule.speedups=[1,90]", "this model reaches at most"),
        ("publish.tag=v1", "without publish.repository"),
        ("optim.learning_rte=1", "did you mean 'optim.learning_rate'"),
    ):
        assert train.cli.main(["--recipe", "quickstart", *SMALL, change, "--dry-run"]) == 2
        assert message in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]
