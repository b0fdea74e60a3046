"""A run that is stopped at any moment continues from an intact checkpoint and ends with the same weights."""

import io
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from forked_python import run_python, start_python
from rich.console import Console
from safetensors.torch import load_file
from small_checkpoints import flip
from small_runs import SMALL, metrics, train_small, train_small_on

import skipdecode.training.objective
import train.cli
import train.run
from skipdecode import ConfigError, SkipSchedule
from skipdecode.checkpoint.checksums import CHECKSUMS_FILE
from train.checkpoints import last_complete_checkpoint, resume_advice, set_damaged_aside
from train.stops import RunStopped


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that wrote checkpoints at steps 3, 6 and 9, of which two are kept, and was killed after the last."""
    folder = tmp_path_factory.mktemp("cut") / "run"
    train_small(folder, "train.max_steps=9", "schedule.texts=0")
    (folder / "config.json").unlink()  # marks a finished run
    return folder


def chosen(folder: Path) -> tuple[str | None, str]:
    console = Console(record=True, width=500, file=io.StringIO())
    found = last_complete_checkpoint(folder, console)
    return (Path(found).name if found is not None else None), console.export_text()


def check_same_end(mine: Path, reference: Path) -> None:
    """Check that a run has the weights and the logged losses of another."""
    expected = load_file(reference / "model.safetensors")
    for name, value in load_file(mine / "model.safetensors").items():
        assert torch.equal(value, expected[name]), name
    found, wanted = ([(line["step"], line["loss"]) for line in metrics(each)] for each in (mine, reference))
    assert found == wanted


def test_the_newest_checkpoints_are_kept_with_checksums_of_all_files(cut: Path) -> None:
    kept = sorted(path.name for path in cut.glob("checkpoint-*"))
    assert kept == ["checkpoint-6", "checkpoint-9"]
    for name in kept:
        listed = json.loads((cut / name / CHECKSUMS_FILE).read_text())
        assert set(listed) == {path.name for path in (cut / name).iterdir()} - {CHECKSUMS_FILE}
    assert chosen(cut) == ("checkpoint-9", "")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda c: (c / "optimizer.pt").write_bytes((c / "optimizer.pt").read_bytes()[:-100]), "optimizer.pt has"),
        (lambda c: (c / "scheduler.pt").unlink(), "scheduler.pt is missing"),
        (lambda c: (c / CHECKSUMS_FILE).unlink(), f"it has no {CHECKSUMS_FILE}"),
        (lambda c: (c / CHECKSUMS_FILE).write_text("{"), f"its {CHECKSUMS_FILE} can't be read"),
        (lambda c: flip(c / "model.safetensors"), "model.safetensors has changed since it was written"),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(
    damage: Any, reason: str, cut: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(cut, tmp_path / "run")
    damage(folder / "checkpoint-9")
    name, said = chosen(folder)
    assert name == "checkpoint-6"
    assert "checkpoint-9 is damaged" in said
    assert reason in said
    set_damaged_aside(folder, str(folder / "checkpoint-6"), Console(quiet=True))
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-6"], "rotation keeps the newest"
    assert (folder / "damaged-checkpoint-9").is_dir()
    (folder / "config.json").unlink(missing_ok=True)
    assert "checkpoint-6" in resume_advice(folder)


@pytest.mark.parametrize("damaged", [True, False])
def test_a_run_interrupted_after_its_last_step_finishes_with_the_same_weights(
    damaged: bool, cut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It continues from the last checkpoint, with no step left, or if that is damaged from the one before it."""
    folder = shutil.copytree(cut, tmp_path / "run")
    # The saved recipe contains the folder of the run.
    recipe = (folder / "recipe.yaml").read_text().replace(str(cut), str(folder))
    (folder / "recipe.yaml").write_text(recipe)
    if damaged:
        flip(folder / "checkpoint-9" / "model.safetensors")
    (folder / "model.safetensors").unlink()
    warnings: list[str] = []
    monkeypatch.setattr(transformers.trainer.logger, "warning", warnings.append)
    train_small(folder, "train.max_steps=9", "schedule.texts=0")
    assert not [line for line in warnings if "keys" in line], "the tied LM head is missing in checkpoints"
    check_same_end(folder, cut)
    assert [line["step"] for line in metrics(folder)] == list(range(1, 10))
    assert chosen(folder) == ("checkpoint-9", "")


def test_resuming_under_another_recipe_is_refused_with_the_difference(cut: Path, capsys: Any) -> None:
    changes = ["train.max_steps=9", "schedule.texts=0", "optim.learning_rate=0.5", "schedule.speedups=[1,2]"]
    assert train.cli.main(["--recipe", "quickstart", *SMALL, f"output.dir={cut}", *changes]) == 2
    error = capsys.readouterr().err
    assert "optim.learning_rate was 0.003, is 0.5" in error
    assert "schedule.speedups was [1.0, 2.0, 3.0, 4.0], is [1.0, 2.0]" in error
    assert error.count(" was ") == 2


def signalled(folder: Path, signum: signal.Signals, step: int, *overrides: str) -> tuple[int | None, str]:
    """Send a signal to a run once it has logged `step` steps. Returns its exit status and its output."""
    log = folder.parent / "log.txt"
    run = start_python(["train.py", "--recipe", "quickstart", *SMALL, *overrides, f"output.dir={folder}"], log)
    file = folder / "metrics.jsonl"
    while run.is_alive() and not (file.exists() and len(file.read_text().splitlines()) >= step):
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.1))
    os.kill(run.pid or 0, signum)
    run.join(timeout=120)
    return run.exitcode, log.read_text()


def test_sigterm_stops_a_run_after_saving_a_checkpoint_of_the_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    status, said = signalled(folder, signal.SIGTERM, 1, "train.max_steps=5000", "train.save_steps=5000")
    assert status == 143
    step = metrics(folder)[-1]["step"]
    line = said.splitlines()[-1]
    saved = f"{folder}/checkpoint-{step}"
    assert line.startswith(f"stopped: SIGTERM after step {step}: the last good checkpoint is {saved}")
    assert chosen(folder)[0] == f"checkpoint-{step}"


def test_a_full_disk_stops_the_run_and_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    """The process's file size limit makes the second checkpoint fail."""
    folder = tmp_path / "run"
    code = (
        "import resource, sys, train.checkpoints as c, train.cli\n"
        "save = c.SealedCheckpointTrainer._save_checkpoint\n"
        "def limited(self, *a):\n"
        "    if self.state.global_step > 3: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "    save(self, *a)\n"
        "c.SealedCheckpointTrainer._save_checkpoint = limited\n"
        "sys.exit(train.cli.main(sys.argv[1:]))\n"
    )
    words = ["-c", code, "--recipe", "quickstart", *SMALL, "train.max_steps=9", f"output.dir={folder}"]
    said = tmp_path / "log.txt"
    assert run_python(words, said) == 1, said.read_text()
    line = said.read_text().splitlines()[-1]
    assert line.startswith("stopped: checkpoint-6 could not be written (")
    assert f"the last good checkpoint is {folder}/checkpoint-3; the same command continues from it" in line
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-3"]
    assert not (folder / "unfinished").exists()


def test_a_nan_loss_stops_the_run_and_the_error_names_the_last_good_checkpoint(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = skipdecode.training.objective.completion_loss

    def poisoned(*arguments: Any, **options: Any) -> torch.Tensor:
        poisoned.calls += 1  # type: ignore[attr-defined]
        return original(*arguments, **options) * (float("nan") if poisoned.calls == 5 else 1)  # type: ignore[attr-defined]

    poisoned.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(skipdecode.training.objective, "completion_loss", poisoned)
    folder = tmp_path / "run"
    overrides = ["train.max_steps=9", "train.logging_steps=100", "schedule.speedups=[1]", f"output.dir={folder}"]
    assert train.cli.main(["--recipe", "quickstart", *SMALL, *overrides]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("stopped: the loss or its gradient was infinite or NaN before step 6")
    assert f"the last good checkpoint is {folder}/checkpoint-3" in error
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-3"]
    # If the loss is logged in that step, the run stops at once.
    poisoned.calls = 3  # type: ignore[attr-defined]
    other = [*overrides[:-1], "train.logging_steps=1", f"output.dir={tmp_path / 'other'}"]
    assert train.cli.main(["--recipe", "quickstart", *SMALL, *other]) == 1
    assert "stopped: loss is nan at step 2: no checkpoint was written yet" in capsys.readouterr().err


def test_weights_after_an_infinite_gradient_are_not_saved(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = skipdecode.training.objective.completion_loss

    def poisoned(*arguments: Any, **options: Any) -> torch.Tensor:
        loss = original(*arguments, **options)  # finite, but its gradient won't be
        loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    monkeypatch.setattr(skipdecode.training.objective, "completion_loss", poisoned)
    folder = tmp_path / "run"
    overrides = ["train.max_steps=2", "train.save_steps=1", "train.logging_steps=100", "schedule.speedups=[1]"]
    overrides.append(f"output.dir={folder}")
    assert train.cli.main(["--recipe", "quickstart", *SMALL, *overrides]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "its gradient was infinite or NaN before step 1: no checkpoint was written yet" in error
    assert "start a new run with output.dir=FOLDER and a lower optim.learning_rate" in error
    assert not list(folder.glob("checkpoint-*"))


# The learning rate is so high that the first checkpoint is the best.
WORSE = ["train.finish_with=best", "optim.learning_rate=0.5", "optim.scheduler=constant", "optim.max_grad_norm=1000.0"]


def test_the_best_checkpoint_is_kept_and_its_weights_can_finish_the_run(tmp_path: Path) -> None:
    overrides = ["train.max_steps=12", "schedule.texts=0", "train.save_total_limit=2", "train.validate_rows=8"]
    folder = train_small(tmp_path / "run", *overrides, *WORSE)
    lines = [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6, 9, 12]
    for line in lines:
        parts = [line[f"eval_loss_{speedup}x"] for speedup in (1, 2, 3, 4)]
        assert line["eval_loss"] == pytest.approx(sum(parts) / 4)
    best = min(lines, key=lambda line: line["eval_loss"])["step"]
    kept = {path.name for path in folder.glob("checkpoint-*")}
    assert best in (3, 6)
    assert kept == {f"checkpoint-{best}", "checkpoint-12"}
    ours, expected = (load_file(f / "model.safetensors") for f in (folder, folder / f"checkpoint-{best}"))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def send_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt() -> None:
    raise KeyboardInterrupt


def interfere(patch: pytest.MonkeyPatch, act: Callable[[], None], event: str, step: int) -> None:
    """Act after a run's callback for an event of a step."""
    original = getattr(train.run.MetricsFile, event)

    def told(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        original(self, args, state, control, **kwargs)
        if state.global_step == step:
            act()

    patch.setattr(train.run.MetricsFile, event, told)


def test_a_stopped_run_keeps_its_newest_and_best_checkpoints_and_a_damaged_best_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is one checkpoint."""
    interfere(monkeypatch, send_sigterm, "on_log", 4)
    overrides = ["train.max_steps=6", "train.save_total_limit=1", "train.validate_rows=4", *WORSE]
    folder = tmp_path / "run"
    with pytest.raises(RunStopped, match=r"SIGTERM after step 5: the last good checkpoint is .*checkpoint-5;"):
        train_small(folder, *overrides)
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-5"}
    flip(folder / "checkpoint-3" / "model.safetensors")
    with pytest.raises(RunStopped, match=r"checkpoint-3 can't be used .model.safetensors has changed"):
        train_small(folder, *overrides)
    assert not (folder / "config.json").exists()


def test_sigterm_during_the_last_step_stops_a_run_after_its_finished_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step is logged, and the same command continues with the evaluation."""
    overrides = ["train.max_steps=3", "train.logging_steps=2", "evaluation.speedups=[1]", "evaluation.limit=2"]
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        interfere(patch, send_sigterm, "on_step_end", 3)
        with pytest.raises(RunStopped, match=r"SIGTERM during the last step: .*holds the trained checkpoint"):
            train_small(folder, *overrides)
    assert [line["step"] for line in metrics(folder)] == [2, 3]
    assert (folder / "config.json").exists()
    assert not (folder / "eval").exists()
    train_small(folder, *overrides)
    command = json.loads((folder / "eval" / "report.json").read_text())["command"]
    options = f"--speedup 1 --limit 2 --batch-size 8 --output {folder}/eval"
    assert command == f"python -m eval --checkpoint {folder} {options}"


def test_a_run_does_not_continue_under_other_schedules(tmp_path: Path) -> None:
    file, folder = tmp_path / "own.json", tmp_path / "run"
    overrides = ["schedule.speedups=null", f"schedule.files=[{file}]", "train.max_steps=3", "schedule.texts=0"]
    file.write_text(SkipSchedule(8, 5, 2, horizon=12).to_json())
    train_small(folder, *overrides)
    (folder / "config.json").unlink()
    file.write_text(SkipSchedule(8, 5, 2, horizon=12, placement="even").to_json())
    with pytest.raises(ConfigError, match=r"checkpoint-3 was trained under other .*placement was top, is even"):
        train_small(folder, *overrides)


def test_a_run_does_not_continue_on_other_rows(tmp_path: Path) -> None:
    """The tokenizer that is trained on the rows may differ too."""
    data, folder = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    rows = [f"question {n},answer {n}\n" for n in range(10, 30)]
    (data / "train.csv").write_text("q,a\n" + "".join(rows))
    section = f"{{task: text, path: {data}, options: {{prompt_column: q, completion_column: a}}}}"
    train_small_on(section, folder, "train.max_steps=3", "schedule.texts=0")
    (folder / "config.json").unlink()
    (data / "train.csv").write_text("q,a\n" + "".join(rows[:-1]) + "question 29,another answer\n")
    with pytest.raises(ConfigError, match=r"checkpoint-3 was trained on other rows: restore the original data"):
        train_small_on(section, folder, "train.max_steps=3", "schedule.texts=0")


def test_a_run_killed_at_a_random_moment_ends_with_the_weights_of_an_uninterrupted_one(
    cut: Path, tmp_path: Path
) -> None:
    """scripts/kill_and_resume.py does the same twenty times."""
    folder = tmp_path / "run"
    overrides = ("train.max_steps=9", "schedule.texts=0")
    status, _ = signalled(folder, signal.SIGKILL, random.randint(1, 7), *overrides)
    assert status == -signal.SIGKILL
    train_small(folder, *overrides)
    check_same_end(folder, cut)


def test_a_run_interrupted_in_a_later_epoch_continues_with_the_same_data_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, which uses the same random generator; an epoch has 3 steps of 4 rows."""
    overrides = ["data.options={train_size: 4, validation_size: 4, test_size: 4}", "train.per_device_batch_size=4"]
    overrides += ["train.max_steps=8", "train.save_steps=1", "model.config.dropout=0.1", "schedule.texts=0"]
    straight = train_small(tmp_path / "straight", *overrides)
    for step in (4, 8):  # after the end of an epoch, and in the middle of one
        with monkeypatch.context() as patch:
            interfere(patch, interrupt, "on_log", step)
            with pytest.raises(KeyboardInterrupt):
                train_small(tmp_path / "cut", *overrides)
    check_same_end(train_small(tmp_path / "cut", *overrides), straight)
