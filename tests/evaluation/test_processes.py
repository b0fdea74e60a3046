"""Several processes produce the same report as one, except times. They use gloo, as under torchrun on a CPU."""

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from finished_runs import without_clocks
from forked_python import run_python, start_python
from small_checkpoints import save_checkpoint
from tiny_models import TINY_FAMILIES, randomised, tiny_config
from transformers import AutoTokenizer

import eval.cli
from eval.journal import FILE_NAME
from eval.loading import load_checkpoint
from eval.systems.base import SkipSystem
from skipdecode import SkipSchedule
from skipdecode.checkpoint.skip_config import SkipConfig

# 13 prompts in batches of 3: five, the last of them of one prompt.
SMALL = ["--max-new-tokens", "10", "--limit", "13", "--batch-size", "3", "--time-limit", "4"]
WORDS = ["--speedup", "1", "2", "--lossless", "2", "--agreement", *SMALL]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("processes") / "full", 6)


@pytest.fixture(scope="module")
def llama(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tensor-parallel plan in transformers, with the tokenizer and task of the other checkpoint."""
    folder = tmp_path_factory.mktemp("processes") / "llama"
    tokenizer = AutoTokenizer.from_pretrained(full)
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": 2, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 4, "max_position_embeddings": 128}
    randomised(tiny_config("llama", **TINY_FAMILIES["llama"], **sizes, **special), 0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    remembered = SkipConfig.load(full)
    assert remembered is not None
    remembered.save(folder)
    return folder


def evaluate(checkpoint: Path, output: Path, *words: str, processes: int = 1) -> str:
    """Run `python -m eval` successfully. Returns its output."""
    log = output.with_suffix(".log")
    asked = ["-m", "eval", "--checkpoint", str(checkpoint), "--output", str(output), *words]
    assert run_python(asked, log, processes) == 0, log.read_text()
    return log.read_text()


def predictions(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "predictions").iterdir()}


@pytest.fixture(scope="module")
def alone(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("alone") / "out"
    assert eval.cli.main(["--checkpoint", str(full), "--output", str(output), *WORDS]) == 0
    return output


def test_two_processes_write_the_same_report_as_one(full: Path, alone: Path, tmp_path: Path) -> None:
    said = evaluate(full, tmp_path / "out", *WORDS, processes=2)
    assert predictions(tmp_path / "out") == predictions(alone)
    assert without_clocks(tmp_path / "out") == without_clocks(alone)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {row["processes"] for row in report["rows"]} == {2}
    assert report["command"].startswith("torchrun --nproc_per_node 2 -m eval ")
    assert said.count("2 processes shared the prompts") == 1  # only one process prints
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(path.name for path in alone.iterdir())


def test_all_processes_use_the_thresholds_found_by_the_first(full: Path, tmp_path: Path) -> None:
    words = ["--system", "calm", "--speedup", "2", *SMALL]
    assert eval.cli.main(["--checkpoint", str(full), "--output", str(tmp_path / "one"), *words]) == 0
    evaluate(full, tmp_path / "two", *words, processes=2)
    assert predictions(tmp_path / "two") == predictions(tmp_path / "one")
    assert without_clocks(tmp_path / "two") == without_clocks(tmp_path / "one")


def meeting(rank: int, port: int) -> dict[str, str]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", **place}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_run_and_a_restart_continues_it(
    full: Path, alone: Path, tmp_path: Path, victim: int
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output, log = tmp_path / "out", tmp_path / "log.txt"
    asked = ["-m", "eval", "--checkpoint", str(full), "--output", str(output), *WORDS]
    running = [start_python(asked, log, **meeting(rank, port)) for rank in range(2)]
    deadline = time.monotonic() + 120
    journal = output / FILE_NAME
    while all(process.is_alive() for process in running) and time.monotonic() < deadline:
        if journal.exists() and journal.read_bytes().count(b"\n") >= 6:  # header, plan, and most of a round
            running[victim].kill()
            break
        time.sleep(0.002)
    for process in running:
        process.join(60)
    assert running[victim].exitcode == -signal.SIGKILL, log.read_text()
    other = running[1 - victim].exitcode
    assert other == 2, log.read_text()
    assert "another process of this evaluation has ended" in log.read_text()
    assert not (output / "report.json").exists()
    known = [json.loads(line) for line in journal.read_bytes().splitlines()[1:]]
    said = evaluate(full, output, *WORDS, processes=2)
    assert said.count("continuing the evaluation ") == 1
    assert predictions(output) == predictions(alone)
    assert without_clocks(output) == without_clocks(alone)
    report = json.loads((output / "report.json").read_text())
    for row in report["rows"]:
        seconds = [value["decode_seconds"] for key, value in known if key[0] == "test" and key[-1] == row["label"]]
        assert row["decode_seconds"] >= sum(seconds)  # includes the times from before the kill


def test_an_error_of_one_process_is_printed_once_and_ends_all_processes(
    full: Path, alone: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log.txt"
    for words, message in (
        (["--output", str(alone)], "already holds a report"),
        (["--output", str(tmp_path / "out"), "--device-map", "auto"], "--device-map spreads one model"),
        (["--output", str(tmp_path / "out"), "--task", "nothing"], "unknown task 'nothing'"),
        (["--output", str(tmp_path / "out"), "--tensor-parallel"], "--tensor-parallel: "),
    ):
        log.write_text("")
        assert run_python(["-m", "eval", "--checkpoint", str(full), *words, *SMALL], log, 2) == 2
        errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, log.read_text()
        assert message in errors[0]
    assert not (tmp_path / "out").exists()


# Runs `python -m eval` in processes where the failing one, given first, takes a second to print its error.
SLOW_TO_REPORT = """
import errno, os, sys, time

import eval.cli, eval.journal

class SlowStream:
    def __init__(self, stream):
        self.stream = stream
    def __getattr__(self, name):
        return getattr(self.stream, name)
    def write(self, text):
        if text.startswith(("error", "stopped", "Traceback")):
            time.sleep(1)
        return self.stream.write(text)

def fail(*_):
    raise RuntimeError("a fault of the code") if failure == "fault" else OSError(errno.ENOSPC, "No space left")

rank, failure, *words = sys.argv[1:]
if os.environ["RANK"] == rank:
    sys.stderr = SlowStream(sys.stderr)
    if failure == "setting":
        words += ["--task", "nothing"]
    else:
        eval.journal.Journal.add = fail
sys.exit(eval.cli.main(words))
"""


@pytest.mark.parametrize(
    ("rank", "failure", "message"),
    [
        (0, "setting", "error: unknown task 'nothing'"),
        (1, "setting", "error: unknown task 'nothing'"),
        (0, "disk", "stopped: No space left"),
        (0, "fault", "RuntimeError: a fault of the code"),
    ],
)
def test_no_process_exits_before_the_failed_one_has_printed_its_error(
    rank: int, failure: str, message: str, full: Path, tmp_path: Path
) -> None:
    """As soon as one process has ended, `run_python` ends the others, as torchrun does."""
    log = tmp_path / "log.txt"
    words = ["--checkpoint", str(full), "--output", str(tmp_path / "out"), "--speedup", "1", "2", *SMALL]
    assert run_python(["-c", SLOW_TO_REPORT, str(rank), failure, *words], log, 2) in (1, 2)
    assert message in log.read_text()


def test_tensor_parallel_processes_write_the_same_report_as_a_single_process(llama: Path, tmp_path: Path) -> None:
    words = ["--speedup", "1", "2", "--agreement", "--weights", "model", *SMALL]
    assert eval.cli.main(["--checkpoint", str(llama), "--output", str(tmp_path / "one"), *words]) == 0
    said = evaluate(llama, tmp_path / "parts", *words, "--tensor-parallel", processes=2)
    assert predictions(tmp_path / "parts") == predictions(tmp_path / "one")
    one, parts = (without_clocks(tmp_path / name) for name in ("one", "parts"))
    assert parts.pop("split") == "tensors"
    assert one.pop("split") is None
    assert parts == one
    assert "2 processes held one model together" in said


def test_invalid_combinations_of_processes_and_devices_are_refused(
    full: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--checkpoint", str(full), "--output", str(tmp_path / "out"), *SMALL]
    for more, message in (
        (["--tensor-parallel"], "start them with torchrun"),
        (["--tensor-parallel", "--device-map", "auto"], "--device-map and --tensor-parallel exclude each other"),
        (["--device-map", "auto", "--device", "cpu"], "leave --device out"),
        (["--device-map", "auto", "--weights", "int8"], "supports --weights model only"),
        (["--device-map", "auto", "--lossless", "2"], "doesn't support a model on several devices"),
        (["--tensor-parallel", "--system", "calm"], "leave --tensor-parallel out"),
        (["--tensor-parallel", "--calibrate"], "--calibrate"),
        (["--device-map", "nowhere"], "nowhere"),
    ):
        assert eval.cli.main([*words, *more]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert eval.cli.main(words) == 2
    assert "can't be initialized" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_with_layers_on_other_devices_decodes_the_same(full: Path, tmp_path: Path) -> None:
    whole = load_checkpoint(str(full), None, torch.device("cpu"))
    decoder = "model.decoder"
    places: dict[str, Any] = {f"{decoder}.layers.{n}": "disk" if n in (1, 4) else "cpu" for n in range(6)}
    places |= {f"{decoder}.{name}": "cpu" for name in ("embed_tokens", "embed_positions", "final_layer_norm")}
    places |= {"lm_head": "cpu"}
    os.makedirs(tmp_path / "disk")
    spread = load_checkpoint(str(full), None, None, device_map=places, offload_folder=str(tmp_path / "disk"))
    prompts = [[5, 6, 7, 8], [9, 10]]
    schedule = SkipSchedule(6, 4, 2, horizon=5)
    texts = [SkipSystem("s", each, schedule).decode(prompts, 12).texts for each in (whole, spread)]
    assert texts[0] == texts[1]
