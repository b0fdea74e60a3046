"""Evaluations with baselines, run as a user would: a reference model, confidence exits, batch sizes, interruptions."""

import json
import os
import random
import shutil
import signal
import statistics
import time
from dataclasses import replace
from operator import truediv
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from finished_runs import predictions, without_clocks
from forked_python import start_python
from small_checkpoints import TASK, save_checkpoint

import eval.cli
import eval.drawing
import eval.run
from data import load_task
from eval.drawing import save_png
from eval.journal import FILE_NAME
from eval.results import Report
from eval.systems.base import System
from eval.systems.threshold import TOLERANCE
from skipdecode import CostModel, SkipSchedule, load, solve_schedule
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.schedule.machine_profile import Profile, TimedBatch, describe_cost_model, profile_setting

SMALL = ["--max-new-tokens", "10", "--limit", "9", "--batch-size", "4"]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("rivals") / "full", 6)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("rivals") / "shallow", 2, seed=1)


def evaluate(output: Path, *arguments: Any) -> Report:
    assert eval.cli.main([*map(str, arguments), *SMALL, "--output", str(output)]) == 0
    assert not (output / FILE_NAME).exists()
    report = Report.load(output / "report.json")
    for row in report.rows:
        lines = (output / "predictions" / f"{row.label}.jsonl").read_text().splitlines()
        assert len(lines) == report.examples
    assert len(list((output / "predictions").iterdir())) == len(report.rows)
    assert (output / "frontier.png").read_bytes().startswith(b"\x89PNG")
    return report


def set_generation(folder: Path, **settings: Any) -> None:
    """Change the generation config of a checkpoint."""
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def test_the_output_is_the_same_where_generate_returns_a_dict(full: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(full, tmp_path / "full"))
    set_generation(folder, return_dict_in_generate=True, output_scores=True)
    order = tmp_path / "order.json"  # by which also a model drafts that wasn't trained to skip
    order.write_text("[0, 5, 2, 4, 1, 3]")
    for checkpoint, output in ((full, tmp_path / "plain"), (folder, tmp_path / "more")):
        evaluate(output, "--checkpoint", checkpoint, "--speedup", "2", "--lossless", "2", "auto", "--order", order)
    for label in ("1x", "2x", "lossless-2x", "lossless"):
        assert predictions(tmp_path / "more", label) == predictions(tmp_path / "plain", label)


def test_task_options_add_to_or_replace_those_of_the_training(full: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "train.csv").write_text("ask,say\nWhen?,Never.\n")
    (own / "test.csv").write_text("ask,say\nWhere to?,Rome.\nWhen?,Now.\nWhen?,At noon.\n")
    words = ["--task", "text", "--data-dir", own, "--task-option", "prompt_column=ask", "completion_column=say"]
    report = evaluate(tmp_path / "text", "--checkpoint", full, "--speedup", "1", *words)
    lines = [json.loads(line) for line in (tmp_path / "text" / "predictions" / "1x.jsonl").read_text().splitlines()]
    assert report.task == "text"
    assert [line["references"] for line in lines] == [["Rome."], ["Now.", "At noon."]]
    fewer = evaluate(tmp_path / "fewer", "--checkpoint", full, "--speedup", "1", "--task-option", "test_size=5")
    all_of_them = evaluate(tmp_path / "all", "--checkpoint", full, "--speedup", "1")
    assert (fewer.task, fewer.examples, all_of_them.examples) == ("departures", 5, 9)
    assert predictions(tmp_path / "fewer", "1x") == predictions(tmp_path / "all", "1x")[:5]


def test_a_shallow_checkpoint_is_measured_against_its_reference(
    full: Path, shallow: Path, tmp_path: Path, capsys: Any
) -> None:
    report = evaluate(tmp_path / "out", "--checkpoint", shallow, "--reference", full)
    first, second = report.rows
    assert (first.label, first.system, first.checkpoint, first.num_layers) == ("1x", "full depth", str(full), 6)
    assert (second.label, second.system, second.checkpoint) == ("full-depth", "full depth", str(shallow))
    assert (first.speedup_target, second.speedup_target) == (1, None)
    assert (first.mean_layers, second.mean_layers) == (6, 2)
    assert first.wall_clock_speedup == 1
    assert second.wall_clock_speedup > 1
    assert f"1x: the reference {full} at full depth" in capsys.readouterr().out.replace("\n", "")
    evaluate(tmp_path / "alone", "--checkpoint", shallow, "--speedup", "1")
    assert predictions(tmp_path / "out", "full-depth") == predictions(tmp_path / "alone", "1x")
    assert predictions(tmp_path / "out", "1x") != predictions(tmp_path / "out", "full-depth")


def test_targets_are_allowed_with_a_reference_of_the_same_shape(full: Path, tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "other", 6, seed=2)
    report = evaluate(tmp_path / "out", "--checkpoint", other, "--reference", full, "--speedup", "2")
    assert [(row.label, row.checkpoint) for row in report.rows] == [("1x", str(full)), ("2x", str(other))]


def test_calibrated_thresholds_run_at_most_the_layers_of_their_schedules_on_validation_prompts(
    full: Path, tmp_path: Path, capsys: Any
) -> None:
    report = evaluate(tmp_path / "out", "--checkpoint", full, "--system", "calm", "--speedup", "1.5", "2.5")
    assert [row.label for row in report.rows] == ["1x", "calm-1.5x", "calm-2.5x"]
    assert [row.system for row in report.rows] == ["full depth", "calm", "calm"]
    config = SkipConfig.load(full)
    assert config is not None
    for row in report.rows[1:]:
        schedule = config.plan_for(CostModel.of(load(str(full))[0]), row.speedup_target or 0).schedule
        assert row.schedule is None
        assert row.threshold is not None
        assert row.threshold.prompts == 6
        assert row.threshold.wanted_layers == schedule.mean_budget(8)
        assert row.threshold.found_layers is not None
        assert 0.5 < row.threshold.wanted_layers - row.threshold.found_layers + 0.5 < 0.5 + 20 * TOLERANCE
        assert 1 <= row.mean_layers <= row.layers_per_step <= 6  # a batch runs as deep as its deepest sequence
        assert row.cache_bytes == report.rows[0].cache_bytes
    slow, fast = (row.threshold for row in report.rows[1:])
    assert slow is not None
    assert fast is not None
    assert fast.value < slow.value
    assert "6 validation prompts" in capsys.readouterr().out


def test_given_thresholds_are_rows_and_one_above_1_equals_full_depth(full: Path, tmp_path: Path) -> None:
    words = ["--checkpoint", full, "--system", "calm", "--calm-threshold", "0.05", "1.5"]
    report = evaluate(tmp_path / "out", *words)
    assert [row.label for row in report.rows] == ["1x", "calm-0.05", "calm-1.5"]
    assert [row.speedup_target for row in report.rows] == [1, None, None]
    assert predictions(tmp_path / "out", "calm-1.5") == predictions(tmp_path / "out", "1x")
    assert report.rows[2].mean_layers == report.rows[2].layers_per_step == 6
    assert report.rows[1].mean_layers < 6
    assert "λ 0.05" in (tmp_path / "out" / "report.md").read_text()


def test_a_users_schedule_is_a_row_named_after_its_file(full: Path, tmp_path: Path) -> None:
    file = tmp_path / "fixed-exit.json"
    file.write_text(SkipSchedule(6, 3, 3, decay="constant", placement="bottom").to_json())
    report = evaluate(tmp_path / "out", "--checkpoint", full, "--speedup", "1", "--schedule", file)
    row = report.rows[1]
    assert (row.label, row.system, row.speedup_target, row.mean_layers) == ("fixed-exit", "skip", None, 3)


def test_speed_is_measured_at_the_requested_batch_sizes(full: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["--checkpoint", full, "--speedup", "3", "--time-batch-size", "1", "5", "8", "--time-limit", "7"]
    report = evaluate(tmp_path / "out", *words)
    for row in report.rows:
        assert [(t.batch_size, t.prompts) for t in row.timings] == [(1, 7), (5, 7), (8, 7)]
        assert all(t.decode_seconds > 0 and t.prefill_seconds > 0 and t.tokens_per_second > 0 for t in row.timings)
        assert all(t.speedup.lower <= t.speedup.median <= t.speedup.upper for t in row.timings)
    assert [t.speedup.median for t in report.rows[0].timings] == [1, 1, 1]
    assert all(t.speedup.median > 1 for t in report.rows[1].timings)
    for row in report.rows:  # the speedups of a row are those at the first requested batch size
        assert (row.speed("decode"), row.speed("all")) == (row.timings[0].speedup, row.timings[0].whole_speedup)
    (printed, said), written = capsys.readouterr(), (tmp_path / "out" / "report.md").read_text()
    assert "timing at batch 8 uses a batch of 7: limited by --time-limit" in " ".join(said.split())
    assert "by batch size" in printed
    assert "| 3x | 5 | 7 |" in written
    for text in (printed, written):
        words = " ".join(text.split())
        assert "divided by those of this row at batch 1, for decode and end-to-end (prefill + decode)" in words
        assert "Targets apply to the decode speedup, solved for each batch size by " in words
    for header in (" target ", " speedup (decode) ", " speedup (end-to-end) "):
        assert written.count(header) == 2


def test_outputs_that_never_end_are_counted_in_a_note(full: Path, tmp_path: Path) -> None:
    report = evaluate(tmp_path / "out", "--checkpoint", full, "--speedup", "2")
    assert [(t.batch_size, t.prompts) for t in report.rows[0].timings] == [(4, 9)], "a small test set is timed whole"
    model, tokenizer = load(str(full))
    most = report.max_new_tokens
    endless = 0
    for example in load_task("departures", **TASK).load("test")[: report.examples]:
        inputs = tokenizer(example.prompt, return_tensors="pt")
        found = model.generate(**inputs, max_new_tokens=most, do_sample=False)
        endless += found.shape[1] - inputs["input_ids"].shape[1] == most
    assert report.never_ended == endless
    said = "9 of 9 outputs of the 1x row, whose lengths are used to time all rows, never end:"
    assert any(note.startswith(said) for note in replace(report, never_ended=report.examples).notes())
    assert not any("never end:" in note for note in replace(report, never_ended=report.examples // 2).notes())


def test_targets_are_solved_for_decode_or_end_to_end_and_for_each_batch_size(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "long", 6)
    solver = {"horizon": 20, "over": "all", "lengths": [[2, 97], [30, 3]], "prompt_lengths": [[3000, 1]]}
    config = SkipConfig(solver=solver, task={"name": "departures", "options": TASK})
    config.save(folder)
    model, tokenizer = load(str(folder))
    cost = CostModel.of(model)
    texts = [example.prompt for example in load_task("departures", **TASK).load("test")[:9]]
    prompts = sorted(len(ids) for ids in tokenizer(texts)["input_ids"])
    different = {}
    for over in ("all", "decode"):
        asked = ["--over", over] if over != config.over else []
        words = ["--checkpoint", folder, "--speedup", "1.8", *asked, "--time-batch-size", "1", "4", "32"]
        report = evaluate(tmp_path / over, *words, "--time-limit", "7")
        assert report.over == over
        expected = {}
        for size in (1, 4, 32):
            batches = [prompts[n : n + size] for n in range(0, len(prompts), size)]
            expected[size] = config.plan_for(cost, 1.8, over=over, prompts=batches).schedule.to_dict()
        row = report.rows[1]
        assert {timing.batch_size: timing.schedule for timing in row.timings} == expected
        assert row.timings[0].batch_size == 4, "that of the scores is the row's own"
        assert row.schedule == expected[4]
        different[over] = len({json.dumps(schedule) for schedule in expected.values()})
        assert all(schedule["prompt"] == "full" for schedule in expected.values()) == (over == "decode")
        assert "the end-to-end speedup, " in report.to_markdown() or over == "decode"
    assert max(different.values()) > 1, "batch sizes matter here"


def test_targets_are_solved_with_the_saved_profile_of_this_machine(full: Path, tmp_path: Path) -> None:
    model, _ = load(str(full))
    times = TimedBatch(4, 20, 20, {1: 1.0, 6: 1.9}, {1: 1.0, 6: 6.0}, {1: 0.0, 6: 0.0})
    setting = profile_setting(model, CostModel.of(model), "packed")
    profile = Profile(setting, 6, (times,), "2026-01-02")
    path = profile.save()
    try:
        words = ["--checkpoint", full, "--speedup", "1.5", "--weights", "packed"]
        report = evaluate(tmp_path / "out", *words)
    finally:
        path.unlink()
    expected = solve_schedule(profile.at(batch_size=4, prompt_length=20), 1.5, horizon=8)
    assert report.rows[1].schedule == expected.to_dict()
    assert report.clock == describe_cost_model(profile)
    assert f"solved for each batch size by {report.clock}." in report.to_markdown()


def test_every_system_is_timed_with_the_output_lengths_of_full_depth_on_prompts_spread_over_the_test_set(
    full: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    calls: list[Any] = []
    original = System.decode

    def counted(self: System, prompts: Any, max_new_tokens: int, lengths: Any = None, **asked: bool) -> Any:
        found = original(self, prompts, max_new_tokens, lengths, **asked)
        calls.append((self.label, prompts, max_new_tokens, lengths, found))
        return found

    monkeypatch.setattr(System, "decode", counted)
    words = ["--checkpoint", full, "--system", "calm", "--calm-threshold", "0", "2", "--time-batch-size", "2"]
    report = evaluate(tmp_path / "out", *words, "--time-limit", "5")
    assert [t.prompts for t in report.rows[0].timings] == [5]
    scored = [call for call in calls if call[2] == 10 and call[3] is None]
    own = {
        tuple(ids): length
        for label, prompts, _, _, found in scored
        if label == "1x"
        for ids, length in zip(prompts, found.lengths, strict=True)
    }
    assert len(own) == 9
    by_length = sorted(own, key=len)
    for label in ("1x", "calm-0", "calm-2"):
        timed = [call for call in calls if call[0] == label and call[3] is not None]
        assert [len(prompts) for _, prompts, *_ in timed] == [2, 2, 1] * 2, "fewer than five batches come again"
        for _, prompts, max_new_tokens, lengths, found in timed:
            assert max_new_tokens == 10
            assert lengths == found.lengths == [own[tuple(ids)] for ids in prompts]
            assert found.steps == max(lengths) - 1
        drawn = [len(ids) for _, prompts, *_ in timed for ids in prompts]
        assert drawn == [len(by_length[n]) for n in (0, 2, 4, 6, 8)] * 2
        seconds = [found.decode_seconds for *_, found in timed]
        timing = next(row for row in report.rows if row.label == label).timings[0]
        assert timing.decode_seconds == pytest.approx(sum(seconds) / 2), "of each prompt once"
        full_seconds = [found.decode_seconds for name, *_, lengths, found in calls if name == "1x" and lengths]
        assert timing.speedup.median == statistics.median(map(truediv, full_seconds, seconds))


def test_the_picture_labels_each_report_including_names_with_underscores_and_the_current_folder(
    full: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    named: list[str] = []

    def noted(path: Path, figure: Any) -> None:
        named.extend(text.get_text().strip() for text in figure.legends[0].get_texts())
        save_png(path, figure)

    evaluate(tmp_path / "one", "--checkpoint", full, "--speedup", "1")
    monkeypatch.setattr(eval.drawing, "save_png", noted)
    monkeypatch.chdir(full)
    report = tmp_path / "one" / "report.json"
    evaluate(tmp_path / "two", "--checkpoint", ".", "--speedup", "1", "--compare", f"_other={report}")
    assert named == ["full", "_other"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reference", "SHALLOW", "--speedup", "1", "2"], "has another shape: leave --speedup out"),
        (["--reference", "FULL"], "the checkpoint itself"),
        (["--reference", "OTHERWORDS"], "has another tokenizer (300 tokens, ending in '</s>') than --checkpoint"),
        (["--reference", "STOPS"], "the generation_config.json of STOPS has stop_strings"),
        (["--reference", "BEAMS"], "the generation_config.json of BEAMS: num_beams is 2"),
        (["--reference", "HALF"], "HALF is in bfloat16 and --checkpoint"),
        (["--reference", "SHORT"], "--reference SHORT: the prompt of departures-test-00000 has"),
        (["--reference", "./nowhere"], "isn't a checkpoint: it is not a folder"),
        (["--calm-threshold", "0.5"], "--calm-threshold requires --system calm"),
        (["--system", "calm", "--calm-threshold", "nan"], "--calm-threshold is [nan]"),
        (["--system", "calm", "--calm-threshold", "0.5", "--speedup", "2"], "replaces targets"),
        (["--system", "calm", "--schedule", "x.json"], "--schedule requires --system skip"),
        (["--system", "calm", "--task", "e2e", "--data-dir", "E2E"], "or give thresholds with --calm-threshold"),
        (["--system", "calm", "--calm-threshold", "0.5", "0.50000001"], "two rows would be named 'calm-0.5'"),
        (["--speedup", "1", "--schedule", "DEEPER"], "the schedule is for 9 layers, the model has 6"),
        (["--schedule", "2x.json", "--speedup", "2"], "two rows would be named '2x'"),
        (["--time-batch-size", "0"], "--time-batch-size is [0]"),
        (["--time-batch-size", "8", "8"], "--time-batch-size is [8, 8]"),
        (["--time-limit", "0"], "--time-limit is 0: it must be at least 1"),
        (["--over", "all", "--speedup", "40"], "speedup is 40: with warmup_layers"),
        (["--checkpoint", "E2E"], "'E2E' isn't a checkpoint: it has no config.json"),
        (["--task", "e2ee"], "unknown task 'e2ee'"),
        (["--task", "text", "--data-dir", "E2E"], "in the evaluation --task-option prompt_column=question"),
        (["--task-option", "test_size=few"], "test_size is 'few'"),
        (["--speedup", "0.5"], "targets must be different and at least 1"),
        (["--limit", "0"], "--limit is 0"),
        (["--max-new-tokens", "1"], "--max-new-tokens is 1: it must be at least 2"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--max-new-tokens", "120"], "the model has 128 positions and max_new_tokens is 120"),
        (["--system", "calm", "--reference", "SHALLOW"], "--system calm with --reference has no default targets"),
        (["--speedup", "1", "--lossless", "auto"], "--lossless is auto: the checkpoint was trained for no speedup"),
        (["--lossless", "2", "--order", "ORDER"], "--order requires --lossless auto"),
        (["--lossless", "auto", "--order", "ORDER"], "order file 'ORDER': order has 2 layers: it must have"),
        (["--compare", "nothing"], "expected NAME=PATH"),
        (["--compare", "=report.json"], "expected NAME=PATH"),
        (["--compare", "a=x", "a=y"], "--compare names 'a' twice"),
        (["--compare", "full=x"], "--compare names 'full', which is the name of the checkpoint's own line"),
        (["--compare", "other=E2E/devset.csv"], "is not a report"),
        (["--data-dir", "/nowhere", "--task", "e2e"], "no such folder"),
    ],
)
def test_an_invalid_request_prints_a_one_line_error_and_writes_nothing(
    words: list[str], message: str, full: Path, shallow: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("DEEPER").write_text(SkipSchedule(9, 5, 3).to_json())
    Path("ORDER").write_text("[0, 1]")
    Path("2x.json").write_text(SkipSchedule(6, 5, 3).to_json())
    Path("E2E").mkdir()
    for name in ("devset.csv", "testset_w_refs.csv"):
        Path("E2E", name).write_text("mr,ref\nname[Aromi],Aromi.\n")
    if "OTHERWORDS" in words:
        save_checkpoint(Path("OTHERWORDS"), 2, vocab_size=300)
    if "STOPS" in words:
        set_generation(Path(shutil.copytree(full, "STOPS")), stop_strings=["."])
    if "BEAMS" in words:
        set_generation(Path(shutil.copytree(full, "BEAMS")), num_beams=2)
    if "HALF" in words:
        shutil.copytree(full, "HALF")
        load(str(full))[0].bfloat16().save_pretrained("HALF")
    if "SHORT" in words:
        save_checkpoint(Path("SHORT"), 2, max_position_embeddings=24)
    named = {"SHALLOW": str(shallow), "FULL": str(full)}
    words = [named.get(word, word) for word in words]
    status = eval.cli.main(["--checkpoint", str(full), "--output", "out", *SMALL, *words])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert status == 2
    assert error.startswith("error: ")
    assert message in error
    assert not Path("out").exists()


RESUMED = ["--system", "calm", "--speedup", "1.5", "2.5", "--time-batch-size", "2", "--time-limit", "4"]


def test_an_evaluation_killed_at_any_moment_continues_and_writes_the_same_report(full: Path, tmp_path: Path) -> None:
    words = ["--checkpoint", str(full), *RESUMED]
    evaluate(tmp_path / "straight", *words)
    output = tmp_path / "killed"
    lines = random.Random().randint(2, 15)  # of at least twenty
    run = start_python(["-m", "eval", *words, *SMALL, "--output", str(output)], tmp_path / "log.txt")
    deadline = time.monotonic() + 120
    while run.is_alive() and time.monotonic() < deadline:
        if (output / FILE_NAME).exists() and (output / FILE_NAME).read_bytes().count(b"\n") >= lines:
            run.kill()
        time.sleep(0.002)
    run.join()
    assert run.exitcode == -signal.SIGKILL, (tmp_path / "log.txt").read_text()
    assert not (output / "report.json").exists()
    journal = (output / FILE_NAME).read_bytes()
    # An incomplete line, as after a crash of the machine.
    (output / FILE_NAME).write_bytes(journal + b'[["test", "4", "2", "calm-2')
    before = [json.loads(line) for line in journal.splitlines()[1:]]
    report = evaluate(output, *words)
    assert without_clocks(output) == without_clocks(tmp_path / "straight")
    for row in report.rows:
        assert predictions(output, row.label) == predictions(tmp_path / "straight", row.label)
        known = [value["decode_seconds"] for key, value in before if key[0] == "test" and key[-1] == row.label]
        assert row.decode_seconds >= sum(known)  # includes the times from before the kill


def test_continuing_an_evaluation_with_other_options_is_refused(
    full: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    words = ["--checkpoint", str(full), "--speedup", "2", *SMALL, "--output", str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        patched.setattr(eval.run, "_report", Mock(side_effect=KeyboardInterrupt))
        assert eval.cli.main(words) == 130
    before = (tmp_path / "out" / FILE_NAME).read_bytes()
    for change, message in [
        (["--batch-size", "3"], "(batch_size was 4, is 3, "),
        (["--speedup", "3"], "(speedups was [2.0], is [3.0])"),
        (["--weights", "model"], "(weights was None, is model)"),
        (["--lossless", "3"], "(lossless was [], is [3.0])"),
        (["--agreement"], "(agreement was False, is True)"),
        (["--limit", "8"], "limit was 9, is 8"),
        (["--split", "train"], "split was test, is train"),
    ]:
        assert eval.cli.main([*words, *change]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ")
        assert message in error
    assert (tmp_path / "out" / FILE_NAME).read_bytes() == before
    status = (full / "model.safetensors").stat()
    try:
        (full / "model.safetensors").touch()
        assert eval.cli.main(words) == 2
        assert "checkpoint.model.safetensors was" in capsys.readouterr().err
    finally:
        os.utime(full / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert eval.cli.main(words) == 0
