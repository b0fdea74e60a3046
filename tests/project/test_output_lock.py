"""Two runs, evaluations, searches or publications never write into one folder at the same time."""

import fcntl
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL

import eval.cli
import eval.load.cli
import eval.output
import eval.report.cli
import eval.search.cli
import eval.speed.cli
import train.cli
from eval.output import only_writer
from skipdecode import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The lock of a folder, as another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("4711\nelsewhere\n")
        file.flush()
        yield


def start(command: str, folder: Path) -> int:
    if command == "train":
        return train.cli.main(["--recipe", "quickstart", *SMALL, f"output.dir={folder}"])
    if command == "eval":
        return eval.cli.main(["--checkpoint", "x", "--output", str(folder)])
    return eval.search.cli.main(["--checkpoint", "x", "--speedup", "2", "--output", str(folder)])


@pytest.mark.parametrize("command", ["train", "eval", "search"])
def test_a_folder_that_another_process_writes_into_is_refused_and_left_alone(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(eval.output, "LOCK_TIMEOUT", 0.05)
    folder = tmp_path / "out"
    with held(folder):
        assert start(command, folder) == 2
        assert [file.name for file in folder.iterdir()] == [".lock"]
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ")
    assert f"{folder}: another run is writing here (process 4711 on elsewhere)" in said


def test_a_checkpoint_that_another_process_publishes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval.output, "LOCK_TIMEOUT", 0.05)
    monkeypatch.setattr(sys, "argv", ["publish.py", str(tmp_path), "me/x"])
    publish = runpy.run_path(str(ROOT / "scripts" / "publish.py"))["main"]
    with held(tmp_path), pytest.raises(ConfigError, match="another run is writing here"):
        publish()


def test_the_lock_of_a_killed_process_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from eval.output import only_writer\n"
        "with only_writer(Path(sys.argv[1]), 'x'): print('held', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert (tmp_path / ".lock").read_text().splitlines()[0] == str(process.pid)
    process.send_signal(signal.SIGKILL)  # and not waited for: it may still be ending when the next one starts
    with only_writer(tmp_path, "x"):
        assert (tmp_path / ".lock").read_text().splitlines()[0] == str(os.getpid())
    process.communicate()


def test_nothing_is_left_of_a_lock(tmp_path: Path) -> None:
    with only_writer(tmp_path / "a" / "b", "x"):
        pass
    assert not list(tmp_path.iterdir())
    with only_writer(tmp_path / "a" / "b", "x"):
        (tmp_path / "a" / "b" / "file").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["file"]
    with pytest.raises(ConfigError), only_writer(tmp_path / "c", "x"):
        raise ConfigError("refused")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("main", "words"),
    [(eval.speed.cli.main, ["--model", "opt-tiny"]), (eval.load.cli.main, ["--url", "http://127.0.0.1:9/v1"])],
)
def test_a_benchmark_that_another_process_writes_is_refused(
    main: Any, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(eval.output, "LOCK_TIMEOUT", 0.05)
    with only_writer(tmp_path, "x", "mine.json"):
        assert main([*words, "--output", str(tmp_path / "mine.json")]) == 2
        assert f"--output {tmp_path / 'mine.json'}: another run is writing here" in capsys.readouterr().err
        with only_writer(tmp_path, "x", "other.json"):
            pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["train", "eval", "search"])
def test_a_folder_that_can_not_be_made_is_one_line_before_anything_is_done(
    command: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "out", Path("/proc/out")):  # which root can't make either
        assert start(command, folder) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("error: ")
        assert f"{folder} can't be written: " in said
    assert start(command, tmp_path / "file") == 2
    assert "file" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("where", ["file/new", "/proc/new"])
def test_a_file_that_can_not_be_written_is_one_line_before_anything_is_done(
    where: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "file").touch()
    commands = [
        (eval.speed.cli.main, ["--model", "opt-tiny", "--output"], ".json"),
        (eval.load.cli.main, ["--url", "http://127.0.0.1:9/v1", "--output"], ".json"),
        (eval.report.cli.main, ["nothing", "--output"], ".html"),
    ]
    for main, arguments, suffix in commands:
        assert main([*arguments, str(tmp_path / where) + suffix]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {tmp_path / where}{suffix} can't be written: ")
        assert said.count("\n") == 1
