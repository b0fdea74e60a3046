"""The command-line program `skipdecode`."""

import gc
import io
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import save_checkpoint

import skipdecode
from skipdecode import SkipSchedule, skip_generate, solve_schedule
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.cli.options import command_parser, main
from skipdecode.cli.process import quick_imports, run_command
from skipdecode.generate.fast_path import fast_path
from skipdecode.schedule.machine_profile import Profile, TimedBatch, profile_setting, profiles_folder
from skipdecode.timing.compare import Decoded, Decoder, compare

PROMPTS = ["vehicle: ferry | to: Saltfern\n", "vehicle: train | to: Mossford | leaves: 9.40\n"]
TYPED = [prompt.replace("\n", "\\n") for prompt in PROMPTS]
SHORT = ["--max-new-tokens", "9"]
# Modules, of this repository and of others, that `skipdecode generate` must not import.
NOT_FOR_GENERATE = {
    *("configs", "data", "eval", "train"),
    *("skipdecode.checkpoint.export", "skipdecode.checkpoint.remote_code", "skipdecode.engine.engine"),
    *("skipdecode.generate.remote_entry", "skipdecode.serve", "skipdecode.timing.calibrate"),
    *("datasets", "deepspeed", "fastapi", "matplotlib", "omegaconf", "pandas", "peft", "pyarrow", "pydantic"),
    *("sacrebleu", "scipy", "sklearn", "uvicorn", "wandb"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("command") / "tiny", 6)


def expected(checkpoint: Path, prompts: list[str], **how: Any) -> list[str]:
    model, tokenizer = skipdecode.load(str(checkpoint))
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    ids = model.generate(**inputs, custom_generate=skip_generate, max_new_tokens=9, **how)
    return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def schedule_of(checkpoint: Path, speedup: float) -> SkipSchedule:
    model, _ = skipdecode.load(str(checkpoint))
    config = SkipConfig.of(model.config)
    assert config is not None
    return config.plan_for(skipdecode.CostModel.of(model), speedup).schedule


def test_standard_input_that_is_no_utf8_gets_a_one_line_error(
    checkpoint: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"vehicle: \xff\n"), encoding="utf-8"))
    assert main(["generate", str(checkpoint), *SHORT]) == 2
    refused(capsys, "standard input can't be read")


def output(capsys: Any) -> tuple[list[str], str]:
    out, err = capsys.readouterr()
    return out.splitlines(), err


def test_characters_that_the_output_encoding_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    assert run_command(lambda: print("café → 日")) == 0
    assert written.getvalue() == "café \\u2192 \\u65e5\n".encode("latin-1")


def test_prompts_can_be_arguments_or_lines_of_a_file_or_of_standard_input(
    checkpoint: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [line for text in expected(checkpoint, PROMPTS, speedup=2) for line in text.splitlines()]
    assert main(["generate", str(checkpoint), "--speedup", "2", *SHORT, *TYPED]) == 0
    out, err = output(capsys)
    assert out == texts
    assert " of 6 layers per token, " in err
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(TYPED) + "\n\n")
    assert main(["generate", str(checkpoint), "--speedup", "2", *SHORT, "--file", str(file)]) == 0
    assert output(capsys)[0] == texts
    for words in ([], ["--file", "-"]):
        # Some editors write a byte order mark.
        monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeff" + file.read_text()))
        assert main(["generate", "--speedup", "2", *SHORT, str(checkpoint), *words]) == 0
        assert output(capsys)[0] == texts


def test_json_output_has_the_number_of_tokens_and_mean_layers(
    checkpoint: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "\n".join(json.dumps({"prompt": prompt, "id": 7}) for prompt in PROMPTS)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["generate", str(checkpoint), "--speedup", "3", *SHORT, "--json"]) == 0
    out, _ = output(capsys)
    found = [json.loads(line) for line in out]
    assert [line["prompt"] for line in found] == PROMPTS
    assert [line["text"] for line in found] == expected(checkpoint, PROMPTS, speedup=3)
    schedule = schedule_of(checkpoint, 3)
    for line in found:
        steps = line["tokens"] - 1
        assert line["layers"] == pytest.approx(sum(schedule.budget(i) for i in range(steps)) / steps)


def test_streaming_writes_the_same_text(checkpoint: Path, capsys: Any) -> None:
    assert main(["generate", str(checkpoint), TYPED[0], "--stream", "--speedup", "3", *SHORT]) == 0
    out, _ = output(capsys)
    assert "\n".join(out).strip() == expected(checkpoint, PROMPTS[:1], speedup=3)[0].strip()


def test_generate_decodes_with_a_schedule_file_in_batches(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    schedule = SkipSchedule(6, 3, 2, horizon=4)
    file = tmp_path / "mine.json"
    file.write_text(schedule.to_json())
    assert main(["generate", str(checkpoint), *TYPED, *SHORT, "--schedule", str(file), "--batch-size", "1"]) == 0
    out, _ = output(capsys)
    assert "\n".join(out) == "\n".join(expected(checkpoint, [prompt], schedule=schedule)[0] for prompt in PROMPTS)


def changed(checkpoint: Path, folder: Path, name: str, change: Callable[[Any], Any]) -> Path:
    """A copy of a checkpoint in which a JSON file is changed."""
    file = shutil.copytree(checkpoint, folder) / name
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))
    return folder


def test_the_checkpoints_own_stop_strings_end_each_sequence_of_a_batch(
    checkpoint: Path, tmp_path: Path, capsys: Any
) -> None:
    model, tokenizer = skipdecode.load(str(checkpoint))
    decoder = Decoder(model, tokenizer, 9)
    plain = decoder.decode(PROMPTS, decoder.plan(1).schedule).completions
    stop = next(text for token in plain[0].ids[2:] if (text := tokenizer.decode([token])).isascii())
    own = {"stop_strings": [stop], "return_dict_in_generate": True}
    folder = changed(checkpoint, tmp_path / "own", "generation_config.json", lambda values: values.update(own))
    assert main(["generate", str(folder), *TYPED, *SHORT, "--speedup", "1", "--json"]) == 0
    found = [json.loads(line) for line in output(capsys)[0]]
    lengths = []
    for line, whole in zip(found, plain, strict=True):
        texts = [tokenizer.decode(whole.ids[: n + 1]) for n in range(len(whole.ids))]
        lengths.append(next((n for n, text in enumerate(texts, start=1) if stop in text), len(texts)))
        assert (line["text"], line["tokens"]) == (texts[lengths[-1] - 1], lengths[-1])
    assert lengths[0] < lengths[1]  # otherwise nothing was cut off


def test_lossless_output_is_that_of_full_depth_and_reports_the_layers_that_ran(
    checkpoint: Path, tmp_path: Path, capsys: Any
) -> None:
    words = ["generate", str(checkpoint), *TYPED, *SHORT, "--json"]
    assert main([*words, "--speedup", "3", "--lossless"]) == 0
    out, err = output(capsys)
    assert [json.loads(line)["text"] for line in out] == expected(checkpoint, PROMPTS, speedup=1)
    layers = json.loads(out[0])["layers"]
    assert layers > 1
    assert err.startswith(f"{layers:.2f} of 6 layers per token, ")
    assert main([*words, "--lossless"]) == 2
    refused(capsys, "this model's config names no speed above 1 that it was trained for")
    (tmp_path / "order.json").write_text("[0, 5, 2, 1, 4, 3]")
    assert main([*words, "--lossless", "--order", str(tmp_path / "order.json")]) == 0
    assert [json.loads(line)["text"] for line in output(capsys)[0]] == expected(checkpoint, PROMPTS, speedup=1)
    trained = shutil.copytree(checkpoint, tmp_path / "trained")
    SkipConfig({2.0: SkipSchedule(6, 3, 1, horizon=8)}, {"horizon": 8}).save(trained)
    assert main(["generate", str(trained), *words[2:], "--lossless"]) == 0
    assert [json.loads(line)["text"] for line in output(capsys)[0]] == expected(checkpoint, PROMPTS, speedup=1)


def test_samples_depend_only_on_the_seed(checkpoint: Path, capsys: Any) -> None:
    words = ["generate", str(checkpoint), TYPED[0], *SHORT, "--temperature", "5", "--seed"]
    texts = []
    for seed in ("1", "1", "2"):
        assert main([*words, seed]) == 0
        texts.append(output(capsys)[0])
    assert texts[0] == texts[1] != texts[2]


def test_info_shows_what_each_speedup_costs(checkpoint: Path, capsys: Any) -> None:
    assert main(["info", str(checkpoint), "--speedup", "1", "2.5", "--new-tokens", "16"]) == 0
    out, _ = output(capsys)
    assert out[0].startswith(f"{checkpoint}: opt, 6 layers, 0.")
    assert "on the task departures" in out
    schedule = schedule_of(checkpoint, 2.5)
    full, fast = (line.split() for line in out if line.lstrip().startswith(("1x", "2.5x")))
    assert full[:10] == ["1x", "6", "to", "6", "of", "6", "6", "6.00", "1.00x", "1.00x"]
    assert fast[1:7] == [str(schedule.max_layers), "to", str(schedule.min_layers), "of", "6", "6"]
    assert float(fast[7]) == pytest.approx(schedule.mean_budget(16), abs=0.005)
    decoding, end_to_end = (float(speed.rstrip("x")) for speed in fast[8:10])
    assert decoding >= 2.5
    assert 1 < end_to_end < decoding, "the prompt runs every layer"
    assert "targets refer to decoding; speedups over full depth, by the analytical cost model" in out[-1]
    assert main(["info", str(checkpoint), "--speedup", "2.5", "--new-tokens", "16", "--over", "all"]) == 0
    assert "targets refer to prefill and decoding together" in output(capsys)[0][-1]


def test_after_calibration_speedups_are_solved_for_the_measured_times(checkpoint: Path, capsys: Any) -> None:
    words = ["calibrate", str(checkpoint), "--batch-size", "1", "2", "--repeats", "1", "--prompt-length", "7"]
    assert main(words) == 0
    out, err = output(capsys)
    assert [line.split()[:2] for line in out[1:3]] == [["1", "7"], ["2", "7"]]
    assert err.splitlines() == ["1 of 2 rounds of 2 batches timed", "2 of 2 rounds of 2 batches timed"]
    (path,) = profiles_folder().iterdir()
    try:
        assert str(path) in out[-1]
        model, _ = skipdecode.load(str(checkpoint))
        solved = Profile.load(path).at(batch_size=2, prompt_length=64)
        config = skipdecode.checkpoint.skip_config.SkipConfig.of(model.config)
        assert config is not None
        slow = math.floor(solved.speedup(SkipSchedule(6, 1, 1, horizon=config.solver["horizon"])) * 50) / 100 + 0.5
        slow = max(1.0, slow)  # on a busy machine, layers may seem to cost nothing
        schedule = solve_schedule(solved, slow, horizon=config.solver["horizon"])
        assert main(["info", str(checkpoint), "--speedup", str(slow), "--batch-size", "2"]) == 0
        out, _ = output(capsys)
        (row,) = (line.split() for line in out if line.lstrip().startswith(f"{slow:g}x"))
        assert row[1:4] == [str(schedule.max_layers), "to", str(schedule.min_layers)]
        assert "speedups over full depth, by the calibrated profile of " in out[-1]
    finally:
        path.unlink()


def test_info_marks_trained_targets_that_this_machine_cannot_reach(
    checkpoint: Path, tmp_path: Path, capsys: Any
) -> None:
    trained = str(shutil.copytree(checkpoint, tmp_path / "trained"))
    speeds = {1.0: SkipSchedule.full_depth(6), 2.0: SkipSchedule(6, 3, 1), 4.0: SkipSchedule(6, 1, 1)}
    SkipConfig(speeds, {"horizon": 8}).save(trained)
    model, _ = skipdecode.load(trained)
    sizes, times = skipdecode.CostModel.of(model), {1: 1.0, 6: 3.0}
    batch = TimedBatch(1, 64, 72, times, times, dict.fromkeys(times, 0.0))
    path = Profile(profile_setting(model, sizes, fast_path(model).usual_weights()), 6, (batch,), "2026-01-02").save()
    try:
        assert main(["info", trained]) == 0
        out, _ = output(capsys)
        rows = [line.split() for line in out[-6:-3]]
        assert [row[:2] for row in rows] == [["1x", "6"], ["2x", "3"], ["4x", "(planned"]]
        assert rows[2][2:7] == ["3.00x)", "1", "to", "1", "of"]
        assert rows[2][-1] == "yes"
        assert "the fastest schedule that the checkpoint was trained for runs in its place" in out[-1]
        assert main(["info", trained, "--speedup", "4", "--strict"]) == 2
        last = output(capsys)[1].splitlines()[-1]
        assert "speedup is 4: this checkpoint reaches at most 3.00 by the calibrated profile of 2026-01-02" in last
    finally:
        path.unlink()


def test_a_server_started_in_the_checkpoint_folder_has_the_name_of_that_folder(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")
    served: list[str] = []
    monkeypatch.setattr("skipdecode.serve.main.run", lambda _, __, settings, *where: served.append(settings.name) or 0)
    monkeypatch.chdir(checkpoint)
    for name in (".", f"../{checkpoint.name}/"):
        assert main(["serve", name]) == 0
    assert served == [checkpoint.name] * 2


def test_compare_shows_outputs_and_times_side_by_side(checkpoint: Path, capsys: Any) -> None:
    assert main(["compare", str(checkpoint), TYPED[0], *SHORT, "--speedup", "2", "3", "--repeats", "1"]) == 0
    out, _ = output(capsys)
    assert out[0] == f"> {PROMPTS[0].strip()}"
    assert [head.strip() for head in out[1].split("|")] == ["1x", "2x", "3x"]
    rows = [line.split() for line in out[-6:-3]]
    assert [row[0] for row in rows] == ["1x", "2x", "3x"]
    assert rows[0][1:4] == ["1.00x", "1.00x", "6.00"]
    spread = r"\d+\.\d\dx \[\d+\.\d\d, \d+\.\d\d\]"
    assert all(re.fullmatch(f"{spread} {spread}", " ".join(row[1:7])) for row in rows[1:])
    assert float(rows[2][7]) < float(rows[1][7]) < 6
    assert [row[-5:-3] for row in rows[:1]] == [["100.0", "%"]]
    assert all(0 <= float(row[-5]) <= 100 for row in rows)


def test_compare_times_the_same_steps_in_interleaved_rounds_after_a_warm_up(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fake clock: 10 ms for a step at full depth, and five times that in one of the five rounds."""
    monkeypatch.setattr("skipdecode.timing.compare.MIN_SECONDS", 0.0)
    decoder = Decoder(*skipdecode.load(str(checkpoint)), 24)
    calls: list[tuple[int, int | None]] = []
    decode = decoder.decode

    def timed(prompts: Any, schedule: SkipSchedule, streamer: Any = None, *, tokens: int | None = None) -> Decoded:
        found = decode(prompts, schedule, streamer, tokens=tokens)
        calls.append((schedule.max_layers, tokens))
        if tokens is None:
            return found
        assert {completion.tokens for completion in found.completions} <= set(range(1, tokens + 1))
        assert found.steps == tokens - 1
        seconds = sum(schedule.budget(i) for i in range(tokens - 1)) / 600
        seconds *= 5 if len(calls) == 6 else 1
        return replace(found, decode_seconds=seconds, prefill_seconds=0.05)

    monkeypatch.setattr(decoder, "decode", timed)
    found = compare(decoder, PROMPTS, [2.0], 5)
    depth, fast = decoder.plan(1).schedule, decoder.plan(2).schedule
    written = decoder.tokenizer(expected(checkpoint, PROMPTS, speedup=1))["input_ids"]
    assert found.tokens >= max(map(len, written)) - 1
    assert calls[:4] == [(6, None), (fast.max_layers, None), (6, found.tokens), (fast.max_layers, found.tokens)]
    turns = [layers for layers, _ in calls[4:]]
    assert turns == [{"a": 6, "b": fast.max_layers}[each] for each in "abbabaabab"]
    steps = range(found.tokens - 1)
    expected_speedup = sum(map(depth.budget, steps)) / sum(map(fast.budget, steps))
    end_to_end = (0.05 + sum(map(depth.budget, steps)) / 600) / (0.05 + sum(map(fast.budget, steps)) / 600)
    assert found.paces[1].end_to_end.median == pytest.approx(end_to_end)
    assert found.paces[0].speedup.median == found.paces[0].end_to_end.median == 1
    assert found.paces[1].speedup.median == pytest.approx(expected_speedup)
    assert found.paces[1].layers == pytest.approx(sum(map(fast.budget, steps)) / len(steps))


@pytest.mark.parametrize("tokens", ["1", "2"])
def test_compare_gives_no_speedup_for_outputs_too_short_to_be_timed(checkpoint: Path, capsys: Any, tokens: str) -> None:
    assert main(["compare", str(checkpoint), TYPED[0], "--max-new-tokens", tokens, "--speedup", "2"]) == 0
    out, _ = output(capsys)
    assert out[-1].startswith(f"the outputs are too short to be timed: none has more than {tokens} token")
    assert "1.00x" not in "\n".join(out)


def test_only_newlines_separate_prompts_and_each_json_object_is_one_line(
    checkpoint: Path, capsys: Any, tmp_path: Path
) -> None:
    marks = "to:\u2028Salt\u0085fern\u2029\x0b\x1c"
    (tmp_path / "prompts.txt").write_text(f"{marks}a\n{marks}b\n", encoding="utf-8-sig")
    lines = "".join(json.dumps({"prompt": marks + end}, ensure_ascii=False) + "\n" for end in "ab")
    (tmp_path / "prompts.jsonl").write_text(lines, encoding="utf-8")
    texts = expected(checkpoint, [marks + "a", marks + "b"], speedup=1)
    assert main(["generate", str(checkpoint), *SHORT, "--file", str(tmp_path / "prompts.txt")]) == 0
    assert capsys.readouterr().out == "".join(text + "\n" for text in texts)
    assert main(["generate", str(checkpoint), *SHORT, "--json", "--file", str(tmp_path / "prompts.jsonl")]) == 0
    out, _ = output(capsys)  # uses splitlines(), which splits at every one of these marks
    assert [json.loads(line)["prompt"] for line in out] == [marks + "a", marks + "b"]
    assert [json.loads(line)["text"] for line in out] == texts


@pytest.mark.parametrize(
    ("files", "content", "message"),
    [
        ("tokenizer*", "", "has no tokenizer that can be loaded"),
        ("tokenizer.json", '{"version": ', "has no tokenizer that can be loaded"),
        ("model.safetensors", "\x07" * 400, "can't be loaded as a causal language model"),
        ("config.json", "{", "can't be loaded as a causal language model"),
        ("config.json", lambda values: values["skipdecode"].pop("solver"), "is damaged (KeyError: 'solver')"),
        ("config.json", lambda values: values.pop("skipdecode"), "doesn't say what schedules it was trained for"),
    ],
)
def test_a_broken_checkpoint_gets_a_one_line_error(
    checkpoint: Path, tmp_path: Path, capsys: Any, files: str, content: Any, message: str
) -> None:
    folder = changed(checkpoint, tmp_path / "broken", "config.json", content if callable(content) else dict)
    for file in [] if callable(content) else folder.glob(files):
        file.write_text(content)
    assert main(["generate", str(folder), TYPED[0], "--speedup", "2"]) == 2
    refused(capsys, message)


def refused(capsys: Any, message: str) -> None:
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert lines == err.splitlines()[-1:]
    assert message in lines[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "CHECKPOINT", "word " * 200], "prompt 1 has "),
        (["generate", "CHECKPOINT", *TYPED, "--max-new-tokens", "125"], "positions; shorten it, or lower --max-new-"),
        (["generate", "CHECKPOINT", "a", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["generate", "CHECKPOINT", "a", "--speedup", "0.5"], "--speedup is 0.5"),
        (["generate", "CHECKPOINT", "a", "--speedup", "50"], "reaches at most"),
        (["generate", "CHECKPOINT", "a", "--batch-size", "0"], "--batch-size is 0"),
        (["generate", "CHECKPOINT", "a", "--dtype", "float16", "--weights", "packed"], "the model is in torch.float16"),
        (["calibrate", "CHECKPOINT", "--dtype", "float16", "--weights", "packed"], "the model is in torch.float16"),
        (["generate", "CHECKPOINT", "a", "--temperature", "-1"], "--temperature is -1"),
        (["generate", "CHECKPOINT", "a", "--top-p", "1.5"], "--top-p is 1.5"),
        (["generate", "CHECKPOINT", "a", "--device", "cuda:9"], "--device is 'cuda:9'"),
        (["generate", "CHECKPOINT", "a", "--file", "prompts.txt"], "use only one"),
        (["generate", "CHECKPOINT"], "standard input has no prompts"),
        (["generate", "CHECKPOINT", "a", "--schedule", "other.json"], "12 layers"),
        (["generate", "CHECKPOINT", "a", "--schedule", "other.json", "--speedup", "2"], "leave --speedup, --over and"),
        (["generate", "CHECKPOINT", "a", "--schedule", "other.json", "--over", "all"], "leave --speedup, --over"),
        (["generate", "CHECKPOINT", "a", "--schedule", "other.json", "--strict"], "leave --speedup, --over and --stri"),
        (["calibrate", "CHECKPOINT", "--batch-size", "1", "0"], "--batch-size is 0"),
        (["calibrate", "CHECKPOINT", "--prompt-length", "-3"], "--prompt-length is -3"),
        (["calibrate", "CHECKPOINT", "--prompt-length", "8", "109"], "is 109: it must be at most 108"),
        (["generate", "CHECKPOINT", "a", "--schedule", "nowhere.json"], "nowhere.json"),
        (["generate", "nowhere/at/all", "a"], "'nowhere/at/all' isn't a checkpoint"),
        (["info", "CHECKPOINT", "--prompt-length", "0"], "--prompt-length is 0"),
        (["compare", "CHECKPOINT", "a", "--repeats", "0"], "--repeats is 0"),
        (["compare", "CHECKPOINT", "a", "--speedup", "2", "2"], "the targets must differ"),
        (["generate", "CHECKPOINT", "a", "--temperature", "1e-300"], "--temperature is 1e-300"),
        (["generate", "CHECKPOINT", "a", "--temperature", "1", "--seed", "-1"], "--seed is -1"),
        (["generate", "CHECKPOINT", "a", "--seed", "3"], "--seed is 3 without sampling: give --temperature or --top-p"),
        (["generate", "CHECKPOINT", "a", "--seed", "0"], "--seed is 0 without sampling"),
        (["generate", "CHECKPOINT", "a", "--lossless", "--over", "all"], "--over is all without --speedup"),
        (["generate", "CHECKPOINT", "a", "--order", "order.json"], "--order needs --lossless"),
        (["generate", "CHECKPOINT", "a", "--lossless", "--order", "nowhere.json"], "order file 'nowhere.json' can't"),
        (["generate", "CHECKPOINT", "a", "--device", "meta"], "--device is 'meta'"),
        (["generate", "CHECKPOINT", "a", "--stream", "--json"], "leave --json out"),
        (["generate", "CHECKPOINT", "a\udcff"], "prompt 1 is not valid UTF-8"),
        (["generate", "CHECKPOINT", "--file", "latin.txt"], "--file 'latin.txt' can't be read"),
        (["generate", "CHECKPOINT", "--json", "--file", "deep.json"], "line 1: expected a JSON object"),
        (["generate", "CHECKPOINT", "--json", "--file", "endless.json"], "line 1: expected a JSON object"),
        (["info", "CHECKPOINT", "--batch-size", "-5"], "--batch-size is -5"),
        (["info", "CHECKPOINT", "--speedup", "nan"], "--speedup is nan"),
        (["info", "CHECKPOINT", "--prompt-length", "100000"], "the model has 128 positions"),
        (["export", "CHECKPOINT", "new", "--speedup", "nan"], "--speedup is nan"),
    ],
)
def test_an_invalid_option_gets_a_one_line_error_and_status_2(
    checkpoint: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n \n"))
    Path("other.json").write_text(SkipSchedule(12, 6, 2).to_json())
    Path("latin.txt").write_bytes("Café".encode("latin-1"))
    Path("deep.json").write_text("[" * 100_000)
    Path("endless.json").write_text('{"prompt": ' + "9" * 5_000 + "}")
    assert main([str(checkpoint) if word == "CHECKPOINT" else word for word in words]) == 2
    refused(capsys, message)


def test_an_options_old_name_warns_and_stands_for_the_new_one(capsys: Any) -> None:
    parser = command_parser("serve")
    new = parser.parse_intermixed_args(["a", "--max-new-tokens-limit", "7"])
    assert (new.max_new_tokens_limit, new.max_new_tokens) == (7, 64)
    assert capsys.readouterr().err == ""
    assert parser.parse_intermixed_args(["--most-new-tokens", "7", "a"]) == new
    assert capsys.readouterr().err == "warning: --most-new-tokens is deprecated: use --max-new-tokens-limit\n"
    assert parser.parse_intermixed_args(["a"]).max_new_tokens_limit == 1024
    assert "--most-new-tokens" not in parser.format_help()


def test_the_help_lists_every_command(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    overview = capsys.readouterr().out
    for command in ("generate", "info", "compare", "export", "calibrate"):
        assert f"  {command} " in overview
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert f"usage: skipdecode {command} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "unneeded"), [("help", {"torch", "transformers", "numpy"}), ("generate", NOT_FOR_GENERATE)]
)
def test_a_command_imports_only_what_it_needs(checkpoint: Path, command: str, unneeded: set[str]) -> None:
    words = ["generate", "--help"] if command == "help" else ["generate", str(checkpoint), *SHORT, *TYPED]
    code = f"""
import gc, sys
from skipdecode.cli.options import main
try:
    main({words})
except SystemExit:
    pass
print(gc.isenabled(), {unneeded} & set(sys.modules) or None)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True None"


def test_python_m_skipdecode_runs_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "skipdecode", "info", "nowhere"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


def test_leaving_a_command_flushes_its_output_and_returns_its_status() -> None:
    code = "import atexit; atexit.register(print, 'farewell'); print('a text')"
    code += "; from skipdecode.cli.process import leave; leave(3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "a text\n", "")


@pytest.mark.parametrize("enabled", [True, False])
def test_quick_imports_pause_the_garbage_collector_and_restore_its_state(enabled: bool) -> None:
    was, found = gc.isenabled(), []
    (gc.enable if enabled else gc.disable)()
    try:
        with suppress(ImportError), quick_imports():
            found.append(gc.isenabled())
            raise ImportError
        assert [*found, gc.isenabled()] == [False, enabled]
    finally:
        (gc.enable if was else gc.disable)()
