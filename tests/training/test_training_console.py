"""The terminal output of a training run: a bar that closes, and few rows of at most 80 characters."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from small_runs import SMALL, metrics, train_small
from transformers import TrainerControl, TrainerState, TrainingArguments

import train.prepare
from eval.console import make_console
from train.progress import MAX_ROWS, TrainingProgress

ROOT = Path(__file__).resolve().parents[2]
LOGS = {"loss": 12.3456, "grad_norm": 0.9, "layers_per_token": 6.5, "tokens_per_second": 123456.7, "epoch": 1.0}
VALIDATION = {"eval_loss": 2.0, "eval_loss_1x": 1.5, "eval_loss_2.25x": 2.0, "eval_loss_4x": 2.5, "eval_runtime": 1.0}
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=80, highlight=False)


def plain() -> Console:
    return Console(file=io.StringIO(), width=80, highlight=False)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines_of(text: str) -> list[str]:
    """All lines sent to a terminal, including overwritten ones, without colours and empty lines."""
    return [line.rstrip() for line in CONTROL.sub("\n", COLOUR.sub("", text)).splitlines() if line.strip()]


def take_steps(progress: TrainingProgress, folder: Path, *, first: int = 0, last: int, steps: int) -> None:
    """Simulate the callbacks of a range of a run's steps, each of which is logged."""
    arguments, control = TrainingArguments(output_dir=str(folder), use_cpu=True), TrainerControl()
    state = TrainerState(global_step=first, max_steps=steps)
    progress.on_train_begin(arguments, state, control)
    for step in range(first + 1, last + 1):
        state.global_step = step
        progress.on_step_end(arguments, state, control)
        progress.on_log(arguments, state, control, logs=LOGS)
    progress.on_log(arguments, state, control, logs=VALIDATION)
    progress.on_log(arguments, state, control, logs={"train_runtime": 1.0})


@pytest.mark.parametrize(
    ("warmup", "steps", "epochs", "said"), [(50, 20, 1, True), (50, -1, 3, False), (60, -1, 3, True)]
)
def test_a_warm_up_as_long_as_the_run_gives_a_warning(
    warmup: int, steps: int, epochs: float, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train.prepare, "describe_schedules", lambda prepared: [])
    length = {"max_steps": steps, "num_train_epochs": epochs, "warmup_steps": warmup}
    batch = {"train_batch_size": 16, "gradient_accumulation_steps": 1, "world_size": 1}
    encoded: Any = SimpleNamespace(rows=range(305), prompts_cut=0, completions_cut=0)  # 20 steps of 16 an epoch
    arguments, nothing = SimpleNamespace(**length, **batch), None
    others: Any = (nothing, encoded, nothing, nothing, SimpleNamespace(solver={}, base_weights=None), arguments)
    prepared = train.prepare.Prepared(torch.nn.Linear(2, 2), *others)
    console = plain()
    train.prepare.introduce(console, "a recipe", prepared)
    assert (f"optim.warmup_steps is {warmup}, but the run has only" in written(console)) == said


def test_without_a_terminal_progress_is_a_limited_number_of_plain_rows_of_80_characters(tmp_path: Path) -> None:
    console = plain()
    with TrainingProgress(console) as progress:
        take_steps(progress, tmp_path, last=4_000, steps=4_000)
    heads, *rows, validation = written(console).splitlines()
    assert heads.split() == ["step", "loss", "grad", "norm", "layers/token", "tokens/s", "time", "left"]
    assert MAX_ROWS <= len(rows) <= MAX_ROWS + 1
    assert rows[0].split() == ["1/4000", "12.346", "0.9", "6.50", "123,457", "?"]
    assert rows[-1].split()[0] == "4000/4000"
    assert validation == "validation after step 4000: loss 1.500 at 1x to 2.500 at 4x"
    assert max(map(len, [heads, *rows, validation])) < 80
    assert "\x1b" not in written(console)


def test_on_a_terminal_a_bar_shows_loss_speed_and_time_left_and_continues_in_a_resumed_run(tmp_path: Path) -> None:
    console = terminal()
    with TrainingProgress(console) as progress:
        take_steps(progress, tmp_path, first=400, last=600, steps=750)
    lines = lines_of(written(console))
    assert any(" 400/750" in line for line in lines)
    assert re.search(r"━ 600/750 loss 12\.346, 123,457 tokens/s, 0:00:\d\d left *$", lines[-1]), lines[-2:]
    assert max(map(len, lines)) <= 80


def test_an_error_closes_the_progress_bar(tmp_path: Path) -> None:
    console = terminal()

    def interrupt() -> None:
        with TrainingProgress(console) as progress:
            take_steps(progress, tmp_path, last=3, steps=9)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert written(console).endswith("\n\x1b[?25h")  # the cursor is on a new line and visible
    assert "3/9 loss" in lines_of(written(console))[-1]


def test_only_the_first_process_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingProgress(make_console(stderr=True, quiet=True)) as progress:
        take_steps(progress, tmp_path, last=3, steps=3)
    assert capsys.readouterr() == ("", "")


def test_a_run_prints_no_dictionaries_of_the_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train_small(tmp_path / "run", "train.max_steps=3", "train.validate_rows=8", "schedule.texts=0")
    out, err = capsys.readouterr()
    assert "{" not in out + err
    assert [line.split()[0] for line in err.splitlines() if "/3 " in line] == ["1/3", "2/3", "3/3"]
    assert "validation after step 3: loss " in err
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3]


def test_a_terminal_shows_one_bar_and_after_ctrl_c_one_line_that_names_the_checkpoint(tmp_path: Path) -> None:
    """The command runs in a pseudo-terminal, with DeepSpeed installed but not used."""
    folder = tmp_path / "run"
    master, slave = pty.openpty()
    command = [sys.executable, "train.py", "--recipe", "quickstart", *SMALL, f"output.dir={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", "TERM": "xterm"}
    how: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdout": slave, "stderr": slave}
    how["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell ignore it
    run = subprocess.Popen([*command, "train.max_steps=200"], **how)
    os.close(slave)
    output, interrupted = "", False
    while True:
        try:
            output += os.read(master, 65536).decode("utf-8", "replace")
        except OSError:  # the command has ended
            break
        if "tokens/s, " in output and any(folder.glob("checkpoint-*")) and not interrupted:
            interrupted = True
            run.send_signal(signal.SIGINT)
    assert run.wait(timeout=60) == 130
    os.close(master)
    lines = lines_of(output)
    assert max(map(len, lines)) <= 80 or max(lines, key=len).startswith("interrupted")
    assert not [line for line in lines if re.search("WARNING|DeepSpeed|{|it/s|Traceback", line)], output
    assert lines[-1].startswith(f"interrupted: the last good checkpoint is {folder}/checkpoint-")
    assert re.search(r"━.* \d+/200 loss \d\.\d{3}, [\d,]+ tokens/s, [?:\d]+ left$", lines[-2]), lines[-3:]
