"""The speed benchmark, run as a user would on a tiny shape."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_checkpoints import save_checkpoint

import eval.speed.run
from configs.shapes import random_model, read_shape
from eval.speed.cli import main
from eval.speed.peers import Transformers
from skipdecode import CostModel, SkipSchedule
from skipdecode.timing.interleave import Ratio

TINY = {"hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 4, "ffn_dim": 48, "num_attention_heads": 4}


@pytest.fixture
def shape(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text("model_type: opt\nvocab_size: 96\n" + "".join(f"{k}: {v}\n" for k, v in TINY.items()))
    return str(path)


def arguments(shape: str, output: Path, **changes: str) -> list[str]:
    options = {"--batch-size": "1 2", "--prompt-length": "6", "--new-tokens": "8", "--repeats": "2", **changes}
    return ["--model", shape, "--output", str(output), *(w for k, v in options.items() for w in [k, *v.split()])]


def test_every_row_has_speedups_over_its_peers_and_a_memory_bound_speedup(
    shape: str, tmp_path: Path, capsys: Any
) -> None:
    output = tmp_path / "speed.json"
    words = {"--speedup": "2 50", "--weights": "packed int8", "--batch-size": "2"}
    words |= {"--peers": "transformers ctranslate2"}
    assert main([*arguments(shape, output, **words), "--predict", "--profile"]) == 0
    report = json.loads(output.read_text())
    rows = report["rows"]
    found = [(row["batch_size"], row["weights"], row["speedup_target"]) for row in rows]
    assert found == [(2, "packed", 1), (2, "packed", 2), (2, "int8", 1), (2, "int8", 2)]
    assert len(report["unreachable"]) == 2
    assert all("50x: speedup is 50: with warmup_layers" in line for line in report["unreachable"])
    for row in rows:
        assert set(row["over_peers"]) == {"transformers", "CTranslate2 float32", "CTranslate2 int8"}
        assert set(row["prefill_over_peers"]) == set(row["over_peers"])
        assert row["end_to_end_seconds"] > row["decode_seconds"] > 0
        assert row["tokens_per_second"] == pytest.approx(row["batch_size"] * 7 / row["decode_seconds"])
        # keys and values of the prompt and of 7 inputs, in float32, where every layer runs every token
        assert row["full_depth_cache_bytes"] == row["batch_size"] * 2 * 4 * (6 + 7) * 32 * 4
        assert (row["cache_bytes"] < row["full_depth_cache_bytes"]) == (row["speedup_target"] > 1)
        if row["speedup_target"] == 1:
            assert row["wall_clock_speedup"] == {"median": 1.0, "lower": 1.0, "upper": 1.0}
            assert row["bound_speedup"] == 1.0
        else:
            assert row["bound_speedup"] > 1.3
    printed = capsys.readouterr().out
    assert "a decode step, by operation" in printed
    assert output.with_suffix(".md").read_text().count("| int8 | 2x |") == 1
    assert output.with_suffix(".png").stat().st_size > 10_000


def test_the_benchmark_calibrates_by_default(shape: str, tmp_path: Path) -> None:
    output = tmp_path / "speed.json"
    assert main(arguments(shape, output, **{"--speedup": "1", "--batch-size": "1", "--peers": ""})) == 0
    report = json.loads(output.read_text())
    assert report["calibrated"]
    assert [row["speedup_target"] for row in report["rows"]] == [1.0]


def test_an_end_to_end_target_reduces_the_layers_of_long_prompts(shape: str, tmp_path: Path) -> None:
    words = {"--speedup": "2", "--batch-size": "1", "--prompt-length": "2000", "--repeats": "1", "--peers": ""}
    rows = {}
    for over, name in (("decode", "decode"), ("all", "end-to-end")):
        output = tmp_path / f"{over}.json"
        assert main([*arguments(shape, output, **words), "--predict", "--over", over]) == 0
        markdown = output.with_suffix(".md").read_text()
        assert "| speedup (decode) | speedup (end-to-end) |" in markdown
        assert f"Targets apply to the {name} speedup." in markdown
        rows[over] = json.loads(output.read_text())["rows"][1]
    assert rows["decode"]["schedule"]["prompt"] == "full"
    assert SkipSchedule.from_dict(rows["all"]["schedule"]).prompt_budget < 4


def test_every_batch_size_uses_the_reported_copy_bandwidth(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = iter([1e9, 1e9, 4e9, 4e9])  # of two repeats at each batch size
    monkeypatch.setattr(eval.speed.run, "copy_bytes_per_second", lambda device: next(copies))
    output = tmp_path / "speed.json"
    assert main([*arguments(shape, output, **{"--speedup": "1", "--peers": ""}), "--predict"]) == 0
    report = json.loads(output.read_text())
    assert report["copy_bytes_per_second"] == 2.5e9
    cost = CostModel.of(random_model(read_shape(shape, "--model"), torch.float32)).stored_as("packed")
    for row in report["rows"]:
        read = sum(cost.step_bytes(4, 6 + step, row["batch_size"]) for step in range(7))
        assert row["bandwidth_share"] * row["decode_seconds"] == pytest.approx(read / 2.5e9)


@pytest.mark.parametrize("cut_off_at", [0, 4, 6, 11])
def test_an_interrupted_benchmark_keeps_its_rows_and_continues_without_timing_anything_twice(
    cut_off_at: int, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    timed: list[tuple[str, int]] = []
    cut_off = False

    def run(self: Any, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
        nonlocal cut_off
        if new_tokens == 10:  # runs of 8 tokens are the warm-up
            if len(timed) == cut_off_at and not cut_off:
                cut_off = True
                raise KeyboardInterrupt
            timed.append((self.name, len(ids)))
        return 0.5, 1.0 + len(timed)

    monkeypatch.setattr(Transformers, "run", run)
    monkeypatch.setattr(eval.speed.run, "copy_bytes_per_second", lambda device: 1e9)
    output = tmp_path / "speed.json"
    words = [*arguments(shape, output, **{"--speedup": "2", "--new-tokens": "10"}), "--predict"]
    assert main(words) == 130
    assert "interrupted: run the same command again to continue" in capsys.readouterr().err
    left = json.loads(output.read_text())["rows"] if output.exists() else []
    assert len(left) == (2 if cut_off_at >= 6 else 0)  # a batch size is two repeats of three decoders, and two rows
    assert main([*words, "--prompt-length", "7"]) == 2
    assert "speed.journal.jsonl belongs to another benchmark (prompt_length was 6, is 7)" in capsys.readouterr().err
    assert main(words) == 0
    report = json.loads(output.read_text())
    assert report["rows"][: len(left)] == left
    assert [(row["batch_size"], row["speedup_target"]) for row in report["rows"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert {timed.count(turn) for turn in timed} == {2}
    assert len(timed) == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["speed.json", "speed.md", "speed.png", "tiny.yaml"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--batch-size": "0"}, "--batch-size is 0: it must lie between 1 and"),
        ({"--new-tokens": "1"}, "--new-tokens is 1: it must lie between 2 and"),
        ({"--vocab-size": "4"}, "--vocab-size is 4: it must lie between 5 and"),
        ({"--speedup": "0.5"}, "--speedup is [0.5]"),
        ({"--speedup": "2 inf"}, "--speedup is [2.0, inf]"),
        ({"--speedup": "2 2"}, "name each once"),
        ({"--batch-size": "2 2"}, "--batch-size is [2, 2]: name each once"),
        ({"--prompt-length": "100000"}, "exceeds the model's 2048 positions"),
        ({"--prompt-stop": "99"}, "--prompt-stop is 99: the model has 4 layers"),
        ({"--output": "tiny.yaml/speed.json"}, "can't be written: Not a directory"),
        ({"--device": "meta"}, "--device is 'meta'"),
        ({"--model": "opt-1.3"}, "unknown --model 'opt-1.3': did you mean 'opt-1.3b'?"),
        ({"--output": "speed.txt"}, "name a .json file"),
        ({"--peers": "llama.cpp"}, "--peers llama.cpp supports Llama models only: this model is opt"),
    ],
)
def test_invalid_input_prints_a_one_line_error_and_writes_nothing(
    shape: str, tmp_path: Path, changes: dict[str, str], message: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = arguments(shape, tmp_path / "speed.json")
    assert main([*words, *(w for k, v in changes.items() for w in [k, *v.split()])]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.yaml"]


def test_the_error_for_a_missing_peer_names_its_extra(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llama_cpp" else found(name))
    shape = tmp_path / "llama.yaml"
    shape.write_text("model_type: llama\nhidden_size: 32\nnum_attention_heads: 4\nnum_hidden_layers: 2\n")
    assert main(arguments(str(shape), tmp_path / "speed.json", **{"--peers": "llama.cpp"})) == 2
    assert "pip install 'skipdecode[llama-cpp]'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["llama.yaml"]


def test_a_model_that_a_peer_cannot_convert_is_refused_with_a_one_line_error(tmp_path: Path, capsys: Any) -> None:
    shape = tmp_path / "olmo.yaml"
    sizes = "hidden_size: 32\nnum_attention_heads: 4\nnum_hidden_layers: 2\nvocab_size: 96\n"
    shape.write_text(f"model_type: olmo\n{sizes}")
    assert main(arguments(str(shape), tmp_path / "speed.json", **{"--peers": "ctranslate2"})) == 2
    assert "CTranslate2 can't convert this model: No conversion is registered" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["olmo.yaml"]


def test_merged_runs_show_medians_and_the_worst_run(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    seconds = {"transformers": 8.0, "skipdecode 1x, model weights": 4.0, "skipdecode 2x, model weights": 2.0}
    slower = 1.0

    def run(self: Any, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
        return seconds[self.name] * slower / 4, seconds[self.name] * (1.0 if "2x" in self.name else slower)

    monkeypatch.setattr(Transformers, "run", run)
    words = {"--speedup": "2", "--batch-size": "1", "--weights": "model"}
    reports = [tmp_path / f"{slower}.json" for slower in (1.0, 0.5, 0.75)]
    for report in reports:
        slower = float(report.stem)
        assert main([*arguments(shape, report, **words), "--predict"]) == 0
    merged = tmp_path / "merged.md"
    assert main(["--merge", *map(str, reports), "--output", str(merged)]) == 0
    cells = [line.strip("| ").split(" | ") for line in merged.read_text().splitlines() if line.startswith("| ")]
    own = [dict(zip(cells[0], row, strict=True)) for row in cells[2:4]]
    assert [row["runs"] for row in own] == ["3", "3"]
    assert [row["prefill (s)"] for row in own] == ["0.750 (1.000)", "0.375 (0.500)"]
    assert [row["tokens/s"] for row in own] == ["2.3 (1.8)", "3.5 (3.5)"]
    assert [row["speedup (decode)"] for row in own] == ["1.00x (1.00x)", "1.50x (1.00x)"]
    assert [row["decode speedup over transformers"] for row in own] == ["2.00x (2.00x)", "3.00x (2.00x)"]
    assert cells[-1] == ["transformers", "3", "1.500 (2.000)", "1.2 (0.9)"]
    assert main(["--merge", *map(str, reports), "--output", str(merged)]) == 2
    assert "merged.md already exists" in capsys.readouterr().err


def test_the_benchmark_ignores_the_generation_config_of_a_checkpoint(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "run", 3)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"stop_strings": ["."], "num_beams": 2, "repetition_penalty": 1.3}))
    words = {"--speedup": "1", "--batch-size": "1"}
    assert main([*arguments(str(folder), tmp_path / "speed.json", **words), "--predict"]) == 0


def test_runs_of_different_benchmarks_are_not_merged(shape: str, tmp_path: Path, capsys: Any) -> None:
    reports = [tmp_path / f"{length}.json" for length in (6, 7)]
    for report in reports:
        words = {"--speedup": "1", "--batch-size": "1", "--peers": "", "--prompt-length": report.stem}
        assert main([*arguments(shape, report, **words), "--predict"]) == 0
    values = json.loads(reports[0].read_text())
    clock, stopping, damaged = (tmp_path / f"{name}.json" for name in ("clock", "stopping", "damaged"))
    clock.write_text(json.dumps({**values, "calibrated": True}))
    damaged.write_text(json.dumps({**values, "machine": {}}))
    values["rows"][0]["schedule"]["prompt_stop"] = 1
    stopping.write_text(json.dumps(values))
    for others, message in (
        ([reports[1]], "prompt_length is 7 in"),
        ([clock], "calibrated is True in"),
        ([stopping], "prompt_stop is 1 in"),
        ([reports[0]], "6.json is the same run as another report"),
        ([tmp_path / "none.json"], "is not a report"),
        ([damaged], "is not a report"),
    ):
        assert main(["--merge", str(reports[0]), *map(str, others), "--output", str(tmp_path / "merged.md")]) == 2
        assert message in capsys.readouterr().err
    assert main(["--merge", str(reports[0]), "--output", str(tmp_path / "merged.json")]) == 2
    assert "name a .md file" in capsys.readouterr().err
    assert not (tmp_path / "merged.md").exists()


def test_an_existing_report_is_never_overwritten(shape: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "speed.md").write_text("kept")
    assert main(arguments(shape, tmp_path / "speed.json")) == 2
    assert "speed.md already exists" in capsys.readouterr().err
    assert (tmp_path / "speed.md").read_text() == "kept"


def test_a_ratio_is_the_median_of_the_ratios_of_each_repeat() -> None:
    ratio = Ratio.of([2.0, 30.0, 4.0], [1.0, 10.0, 1.0])
    assert (ratio.median, ratio.lower, ratio.upper) == (3.0, 2.5, 3.5)
