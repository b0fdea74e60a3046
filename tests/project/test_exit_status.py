"""Ctrl-C, a full disk, and files that can't be written end a command with one line and the right exit status."""

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from small_runs import SMALL

import eval.cli
import eval.load.cli
import eval.load.run
import eval.report.cli
import eval.run
import eval.score.cli
import eval.search.cli
import eval.search.run
import eval.speed.cli
import eval.speed.run
import skipdecode.cli.commands
import skipdecode.cli.options
import train.cli
import train.prepare
import train.run
import train.tracking
from skipdecode import ConfigError
from skipdecode.cli.process import run_command

ROOT = Path(__file__).resolve().parents[2]
FULL = OSError(errno.ENOSPC, "No space left on device", "somewhere/metrics.jsonl")


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ConfigError("--limit is 0"), 2, "error: --limit is 0"),
        (PermissionError(errno.EACCES, "Permission denied", "a"), 2, "error: Permission denied: 'a'"),
        (OSError("Can't reach the Hub\nor anything"), 2, "error: Can't reach the Hub or anything"),
        (FULL, 1, "stopped: No space left on device: 'somewhere/metrics.jsonl': go on"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 1, "stopped: Disk quota exceeded: go on"),
        # As tokenizers and safetensors report it.
        (
            Exception("No space left on device (os error 28)"),
            1,
            "stopped: No space left on device (os error 28): go on",
        ),
        (KeyboardInterrupt(), 130, "interrupted: go on"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_an_error_ends_a_command_with_one_line_and_a_status(
    error: BaseException, status: int, line: str, capsys: Any
) -> None:
    def fail() -> int:
        raise error

    assert run_command(fail, left=lambda: "go on") == status
    assert capsys.readouterr().err == (f"{line}\n" if line else "")


def test_an_unexpected_exception_is_not_caught() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


def test_output_that_cannot_be_written_gets_a_one_line_error() -> None:
    code = "import sys; from skipdecode.cli.process import run_command; sys.exit(run_command(lambda: print('text')))"
    with open("/dev/full", "w") as full:
        result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (1, "stopped: No space left on device\n")


NEW, SERVER = ["--output", "{}/new"], ["--url", "http://127.0.0.1:9/v1", "--task", "departures"]
COMMANDS: dict[str, tuple[Callable[[list[str]], int], list[str], Any, str]] = {
    "train": (train.cli.main, ["--recipe", "quickstart", "output.dir={}/new"], train.run, "run"),
    "eval": (eval.cli.main, [*NEW, "--checkpoint", "x"], eval.run, "run_process"),
    "search": (eval.search.cli.main, [*NEW, "--checkpoint", "x", "--speedup", "2"], eval.search.run, "search"),
    "score": (eval.score.cli.main, [*NEW, "--predictions", "x", "--task", "e2e"], eval.score.cli, "_run"),
    "speed": (eval.speed.cli.main, ["--model", "opt-tiny", "--output", "{}/new.json"], eval.speed.run, "_model"),
    "load": (eval.load.cli.main, ["--output", "{}/new.json", *SERVER], eval.load.run, "load_task"),
    "report": (eval.report.cli.main, ["x", "--output", "{}/new.html"], eval.report.cli, "_write"),
    "skipdecode": (skipdecode.cli.options.main, ["info", "x"], skipdecode.cli.commands, "_decoder"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_and_a_full_disk_end_every_command_with_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    main, arguments, module, function = COMMANDS[name]
    words = [word.format(tmp_path) for word in arguments]
    for error, status, start in ((KeyboardInterrupt(), 130, "interrupted"), (FULL, 1, "stopped: No space left")):

        def fail(*arguments: Any, error: BaseException = error, **options: Any) -> Any:
            raise error

        monkeypatch.setattr(module, function, fail)
        assert main(words) == status
        said = capsys.readouterr().err
        assert said.startswith(start)
        assert said.count("\n") == 1
    if name in ("eval", "search", "speed", "load"):
        assert said.endswith(": run the same command again to continue\n")


def train_in_process(folder: Path, *overrides: str) -> int:
    return train.cli.main(["--recipe", "quickstart", *SMALL, f"output.dir={folder}", *overrides])


def test_a_full_disk_stops_a_run_and_names_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    original = train.tracking.MetricsFile.on_log

    def on_log(self: Any, args: Any, state: Any, *others: Any, **options: Any) -> None:
        if state.global_step == 5:
            raise FULL
        original(self, args, state, *others, **options)

    monkeypatch.setattr(train.tracking.MetricsFile, "on_log", on_log)
    assert train_in_process(tmp_path / "run", "train.max_steps=6") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("stopped: No space left on device: 'somewhere/metrics.jsonl': the last good checkpoint is ")
    assert line.endswith(f"{tmp_path / 'run' / 'checkpoint-3'}; the same command continues from it")


def test_if_the_final_checkpoint_cannot_be_written_the_last_good_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = tmp_path / "run"

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not _internal_call:
            Path(str(output_dir)).mkdir()
            (Path(str(output_dir)) / "model.safetensors").write_bytes(b"the first part")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        original(self, output_dir, _internal_call)

    original = train.prepare.SkipTrainer.save_model
    monkeypatch.setattr(train.prepare.SkipTrainer, "save_model", save_model)
    assert train_in_process(folder, "train.max_steps=3") == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "stopped: the finished checkpoint could not be written (I/O error: No space left on device (os error 28)): "
        f"the last good checkpoint is {folder / 'checkpoint-3'}; the same command continues from it"
    )
    assert not (folder / "unfinished").exists()
