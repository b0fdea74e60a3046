"""A run's metrics and artifacts are complete; an offline W&B run is read back from its own file."""

import json
import shutil
import time
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import metrics, train_small
from wandb.proto.wandb_internal_pb2 import Record

from eval.results import Report
from eval.score.predictions import write_predictions
from skipdecode.checkpoint.checksums import CHECKED_PATTERNS
from skipdecode.files import read_lines
from train.weights_and_biases import _ARTIFACT, Tracker

BLOCK = 32768  # block size of the LevelDB log format, in which W&B writes records
HEADER = 7


def records(file: Path) -> list[Record]:
    """Read every record of a `.wandb` file: a header of 7 bytes, then blocks of chunks (checksum 4, length 2, kind 1).

    A file that is still being written may end within a record, which isn't there yet.
    """
    content = file.read_bytes()
    found, whole, at = [], b"", HEADER
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK  # the rest of the block is too short for a chunk
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        if at + HEADER + length > len(content):
            break
        whole += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(whole)
            found.append(record)
            whole = b""
    return found


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    overrides = ["train.max_steps=4", "train.validate_rows=8", "tracking.wandb=offline", "tracking.name=by-hand"]
    overrides += ["evaluation.speedups=[1,3]", "evaluation.limit=10", "evaluation.max_new_tokens=8"]
    return train_small(tmp_path_factory.mktemp("tracked") / "run", *overrides, drawn=True)


@pytest.fixture(scope="module")
def run_folder(tracked: Path) -> Path:
    (folder,) = (tracked / "wandb").glob("offline-run-*")
    return folder


@pytest.fixture(scope="module")
def written(run_folder: Path) -> list[Record]:
    (file,) = run_folder.glob("run-*.wandb")
    # W&B's own process writes the file, possibly for a moment after the run has finished.
    deadline = time.monotonic() + 60
    while not any(record.WhichOneof("record_type") == "exit" for record in records(file)):
        assert time.monotonic() < deadline, "no end of the run is written"
        time.sleep(0.1)
    return records(file)


def history(written: list[Record]) -> list[dict[str, Any]]:
    rows = [record.history for record in written if record.WhichOneof("record_type") == "history"]
    return [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]


def test_wandb_has_every_logged_step_with_the_metrics_of_metrics_jsonl(tracked: Path, written: list[Record]) -> None:
    logged = [row for row in history(written) if "train/loss" in row]
    lines = metrics(tracked)
    assert len(logged) == len(lines) == 4
    expected = {"loss", "grad_norm", "learning_rate", "speedup_target", "layers_per_token", "layer_column_share"}
    expected |= {"tokens_per_second", "peak_memory_gib"}
    for row, line in zip(logged, lines, strict=True):
        assert expected <= set(line)
        assert any(key.startswith("loss_layers_") for key in line)
        for key, value in line.items():
            if key != "step":
                assert row[f"train/{key}"] == pytest.approx(value), key


def test_the_config_in_wandb_is_the_resolved_recipe(written: list[Record]) -> None:
    run = next(record.run for record in written if record.WhichOneof("record_type") == "run")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert run.display_name == "by-hand"
    assert config["optim"]["learning_rate"] == 0.003
    assert config["schedule"]["speedups"] == [1, 2, 3, 4]


def test_wandb_has_the_pictures_and_tables(tracked: Path, run_folder: Path, written: list[Record]) -> None:
    rows = history(written)
    media = run_folder / "files"
    for name in ("schedules", "frontier_picture"):
        (path,) = [row[f"{name}.path"] for row in rows if f"{name}.path" in row]
        assert (media / path).read_bytes().startswith(b"\x89PNG")
    (path,) = [row["frontier.path"] for row in rows if "frontier.path" in row]
    table = json.loads((media / path).read_text())
    report = json.loads((tracked / "eval" / "report.json").read_text())
    shown = [cells[table["columns"].index("BLEU")] for cells in table["data"]]
    for cell, row in zip(shown, report["rows"], strict=True):
        assert cell.startswith(f"{row['scores']['bleu']:.2f}")
    (path,) = [row["samples.path"] for row in rows if "samples.path" in row]
    table = json.loads((media / path).read_text())
    assert table["columns"] == ["prompt", "reference", "1x", "3x"]
    predictions = read_lines(tracked / "eval" / "predictions" / "3x.jsonl")
    assert [cells[3] for cells in table["data"]] == [json.loads(line)["prediction"] for line in predictions][:8]


def test_samples_may_contain_any_line_separator(tracked: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tracked / "eval", tmp_path / "eval")
    text = "a\vb\fc\x1cd\x1de\x1ef\x85g\u2028h\u2029i\r\nj"
    for file in (folder / "predictions").glob("*.jsonl"):
        lines = [json.loads(line) for line in read_lines(file)]
        write_predictions(file, [{**line, "prompt": text, "references": [text], "prediction": text} for line in lines])
    logged: dict[str, Any] = {}
    run = SimpleNamespace(log=logged.update, summary={})
    Tracker(run).evaluation(folder, Report.load(folder / "report.json"))
    assert logged["samples"].data == [[text] * 4] * 8


@given(st.lists(st.dictionaries(st.text(), st.text() | st.sampled_from(["\u2028", "\u2029", "\x85", "\r"]))))
def test_json_lines_are_read_back_unchanged(values: list[dict[str, str]]) -> None:
    with TemporaryDirectory() as folder:
        write_predictions(Path(folder, "lines.jsonl"), values)
        assert [json.loads(line) for line in read_lines(Path(folder, "lines.jsonl"))] == values


def test_wandb_has_the_checkpoint_as_an_artifact(written: list[Record]) -> None:
    artifacts = [
        record.request.log_artifact.artifact
        for record in written
        if record.WhichOneof("record_type") == "request" and record.request.HasField("log_artifact")
    ] + [record.artifact for record in written if record.WhichOneof("record_type") == "artifact"]
    (artifact,) = [a for a in artifacts if a.type == "model"]
    entries = {entry.path for entry in artifact.manifest.contents}
    assert {"config.json", "model.safetensors", "tokenizer.json", "recipe.yaml"} <= entries
    assert {"custom_generate/generate.py", "custom_generate/schedule_solver.py", "README.md"} <= entries
    checked = [pattern.replace("*", "a") for pattern in CHECKED_PATTERNS]
    # An artifact without them would look damaged.
    assert all(any(fnmatch(name, pattern) for pattern in _ARTIFACT) for name in checked)
    assert not any(entry.startswith(("checkpoint-", "wandb")) for entry in entries)


def test_without_wandb_all_metrics_are_in_the_output_folder(tracked: Path, tmp_path: Path) -> None:
    assert (tracked / "schedules.png").read_bytes().startswith(b"\x89PNG")
    assert [json.loads(line)["step"] for line in (tracked / "validation.jsonl").read_text().splitlines()] == [3, 4]
    folder = train_small(tmp_path / "off", "train.max_steps=4", "train.validate_rows=8", "schedule.texts=0")
    assert not (folder / "wandb").exists()
    for name in ("metrics.jsonl", "validation.jsonl", "schedules.png"):
        assert (folder / name).exists()
    assert [line["loss"] for line in metrics(folder)] == [line["loss"] for line in metrics(tracked)]
