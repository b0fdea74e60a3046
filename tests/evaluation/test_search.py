"""A schedule search, run as a user would on a small checkpoint: results, interruptions and errors."""

import json
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import train_small

import eval.cli
import eval.search.trials
from data import load_task
from eval.decoding import decode_test_set
from eval.score.scores import score
from eval.search.cli import main
from eval.search.report import choose_winner, critical_value, make_rows
from eval.search.trials import FULL_DEPTH, Batch, TrialResult, better_half, plan_rungs
from eval.systems.base import Checkpoint
from skipdecode import SkipSchedule, skip_generate
from skipdecode.checkpoint.checksums import CHECKSUMS_FILE
from skipdecode.checkpoint.loading import load_model, load_tokenizer
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.generate.fast_path import FastPath

VALIDATION, TOKENS = 20, 10
DATA = f"data.options={{train_size: 60, validation_size: {VALIDATION}, test_size: 6}}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = ["train.max_steps=6", "schedule.over=decode", "schedule.batch_size=1", DATA]
    return train_small(tmp_path_factory.mktemp("run") / "finished", *changes)


@pytest.fixture(autouse=True)
def rungs_of_few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval.search.trials, "MIN_PROMPTS", 5)  # so that 20 prompts make rungs of 5, 10 and 20


def arguments(checkpoint: Path, output: Path, **changes: Any) -> list[str]:
    options = {"checkpoint": checkpoint, "output": output, "trials": 9, "batch-size": 4, "max-new-tokens": TOKENS}
    given = {key: value for key, value in {**options, "speedup": 3, **changes}.items() if value is not None}
    return [word for key, value in given.items() for word in (f"--{key}", *str(value).split())]


@pytest.fixture(scope="module")
def found(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eval.search.trials, "MIN_PROMPTS", 5)
        output = tmp_path_factory.mktemp("search") / "found"
        assert main(arguments(checkpoint, output)) == 0
    return output


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "search.json").read_text())
    return report


def test_a_search_writes_all_files_and_the_default_is_the_first_trial(checkpoint: Path, found: Path) -> None:
    files = {file.name for file in found.iterdir()}
    assert files == {"trials.jsonl", "search.json", "search.md", "search.png", "winner.json"}
    assert (found / "search.png").stat().st_size > 20_000
    report = report_of(found)
    config = SkipConfig.load(checkpoint)
    assert config is not None
    rows = {row["trial"]: row for row in report["trials"]}
    assert sorted(rows) == list(range(9))
    assert rows[0]["schedule"] == config.schedules[3.0].to_dict()
    assert rows[0]["difference"] == {"value": 0, "low": 0, "high": 0, "error": 0}
    assert rows[0]["speed_over_default"] == 1
    assert SkipSchedule.load(found / "winner.json").to_dict() == rows[report["winner"]]["schedule"]
    assert report["trained_on"] == 0
    named = "0 (default, winner)" if report["winner"] == 0 else "0 (default)"
    assert f"| {named} |" in (found / "search.md").read_text()


def test_half_of_the_other_schedules_are_dropped_after_each_rung_and_the_default_is_kept(found: Path) -> None:
    report = report_of(found)
    assert report["rungs"] == [5, 10, 20]
    prompts = [row["prompts"] for row in report["trials"]]
    assert prompts == sorted(prompts, reverse=True)  # best first
    assert [prompts.count(n) for n in (20, 10, 5)] == [1 + 3, 1, 4]
    assert next(row for row in report["trials"] if row["trial"] == 0)["prompts"] == 20


def test_search_scores_equal_those_of_decoding_every_prompt_separately(checkpoint: Path, found: Path) -> None:
    report = report_of(found)
    model, tokenizer = load_model(str(checkpoint)).eval(), load_tokenizer(str(checkpoint))
    examples = load_task("departures", validation_size=VALIDATION).load("validation")

    def alone(schedule: SkipSchedule, prompt: str) -> str:
        inputs = tokenizer(prompt, return_tensors="pt")
        request = {"custom_generate": skip_generate, "schedule": schedule, "max_new_tokens": TOKENS}
        with torch.inference_mode():
            ids = model.generate(**inputs, **request, do_sample=False)
        return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()

    references = [example.references for example in examples]
    first = report["trials"][0]
    schedules = [SkipSchedule.full_depth(8), SkipSchedule.from_dict(first["schedule"])]
    scores = [score([alone(schedule, e.prompt) for e in examples], references).values["bleu"] for schedule in schedules]
    assert [report["full_depth"]["value"], first["score"]["value"]] == pytest.approx(scores)


@pytest.mark.parametrize("kill_after", [5, pytest.param(14, marks=pytest.mark.release)])
def test_a_killed_search_continues_and_decodes_nothing_twice(
    checkpoint: Path, found: Path, tmp_path: Path, kill_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[tuple[str, SkipSchedule]] = []

    def counting(*args: Any, **kwargs: Any) -> Iterator[Any]:
        examples, schedules, at = args[2], args[4], 0
        for results in decode_test_set(*args, **kwargs):
            yield results
            # The next batch is requested after this one has been written.
            here = examples[at : at + kwargs["batch_size"]]
            decoded.extend((example.id, schedule) for example in here for schedule in schedules)
            at += len(here)
            if killing and len({name for name, _ in decoded}) == kill_after:
                raise KeyboardInterrupt

    monkeypatch.setattr(eval.search.trials, "decode_test_set", counting)
    killing = True
    assert main(arguments(checkpoint, tmp_path / "again")) == 130
    assert not (tmp_path / "again" / "search.json").exists()
    killing = False
    with (tmp_path / "again" / "trials.jsonl").open("a") as log:
        log.write('[["batch", "4"], {"prompts": [1, 2')  # an incomplete line, as after a crash of the machine
    assert main(arguments(checkpoint, tmp_path / "again")) == 0
    assert len(decoded) == len(set(decoded))
    # Finished: the report is written again without decoding.
    assert main(arguments(checkpoint, tmp_path / "again")) == 0
    timed = ("speedup", "speedup_quartiles", "speed_over_default")
    before, after = (
        [{k: v for k, v in row.items() if k not in timed} for row in report_of(folder)["trials"]]
        for folder in (found, tmp_path / "again")
    )
    assert before == after
    assert len(decoded) == len(set(decoded)) == sum(row["prompts"] for row in after) + VALIDATION


def test_a_continued_search_keeps_its_weight_format_independently_of_free_memory(
    checkpoint: Path, found: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(found, tmp_path / "copy")
    lines = (copy / "trials.jsonl").read_text().splitlines(keepends=True)
    (copy / "trials.jsonl").write_text("".join(lines[:-1]))
    chosen: list[str] = []

    def noted(checkpoint: Checkpoint, *args: Any, **kwargs: Any) -> Iterator[Any]:
        chosen.append(checkpoint.weights)
        return decode_test_set(checkpoint, *args, **kwargs)

    monkeypatch.setattr(eval.search.trials, "decode_test_set", noted)
    before = report_of(found)["weights"]
    other = "model" if before == "packed" else "packed"
    monkeypatch.setattr(FastPath, "usual_weights", lambda fast: other)
    assert main(arguments(checkpoint, copy)) == 0
    assert [*chosen, report_of(copy)["weights"]] == [before] * 2


def test_the_winner_file_works_in_recipes_and_in_evaluations(checkpoint: Path, found: Path, tmp_path: Path) -> None:
    winner = found / "winner.json"
    trained = train_small(tmp_path / "run", "train.max_steps=1", "schedule.speedups=null", f"schedule.files=[{winner}]")
    config = SkipConfig.load(trained)
    assert config is not None
    assert list(config.schedules.values()) == [SkipSchedule.load(winner)]
    words = ["--checkpoint", str(checkpoint), "--output", str(tmp_path / "eval"), "--schedule", str(winner)]
    assert eval.cli.main([*words, "--speedup", "1", "--limit", "2", "--max-new-tokens", "4"]) == 0
    rows = json.loads((tmp_path / "eval" / "report.json").read_text())["rows"]
    assert SkipSchedule.load(winner).to_dict() in [row["schedule"] for row in rows]


def test_a_search_supports_budgets_in_layers_and_calibration(checkpoint: Path, tmp_path: Path) -> None:
    few = {"trials": 3, "limit": 4, "max-new-tokens": 4}
    assert main(arguments(checkpoint, tmp_path / "layers", speedup=None, **{"mean-layers": 4, **few})) == 0
    schedules = [SkipSchedule.from_dict(row["schedule"]) for row in report_of(tmp_path / "layers")["trials"]]
    assert all(schedule.mean_budget(34) <= 4 for schedule in schedules)
    words = arguments(checkpoint, tmp_path / "clock", **{**few, "speedup": 2, "metric": "rougeL"})
    assert main([*words, "--calibrate", "--placements", "top", "ends"]) == 0
    report = report_of(tmp_path / "clock")
    assert report["calibrated"]
    assert "| placement |" in (tmp_path / "clock" / "search.md").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speedup": 1}, "--speedup is 1: it must be above 1"),
        ({"speedup": "99 --strict"}, "speedup is 99: this checkpoint reaches"),
        ({"speedup": None, "mean-layers": "4 --strict"}, "--strict is for --speedup"),
        ({"mean-layers": 4}, "give a budget as either --speedup or --mean-layers"),
        ({"speedup": None}, "give a budget as either"),
        ({"speedup": None, "mean-layers": 8}, "--mean-layers is 8: it must be below the model's 8 layers"),
        ({"speedup": 5, "warmup": 5}, "no schedule besides the default reaches the target in this space"),
        ({"trials": 1}, "--trials is 1: it must be at least 2"),
        ({"limit": 1}, "--limit is 1: it must be at least 2"),
        ({"max-new-tokens": 1}, "--max-new-tokens is 1: it must be at least 2"),
        ({"warmup": 0}, "--warmup is [0]: numbers must be different and at least 1"),
        ({"speedup": "nan"}, "--speedup is nan"),
        ({"trials": 10**9}, "--trials is 1000000000"),
        ({"seed": -1}, "--seed is -1"),
        ({"horizons": 10**9}, "--horizons is [1000000000]: numbers must be at most 1000000"),
        ({"decays": "linear linear"}, "--decays is ['linear', 'linear']"),
        ({"task-option": "validation_size="}, "--task-option 'validation_size=': expected key=value"),
        ({"task-option": "validation_size=few"}, "validation_size is 'few'"),
        ({"task-option": "path=x"}, "--task-option path: set the folder of the task's files with --data-dir"),
        ({"task-option": "validation_sise=3"}, "unknown option of the task 'departures'"),
        ({"task": "departures"}, "isn't a checkpoint"),
    ],
)
def test_invalid_input_prints_a_one_line_error_and_writes_nothing(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], message: str, capsys: Any
) -> None:
    folder = tmp_path if changes == {"task": "departures"} else checkpoint
    assert main(arguments(folder, tmp_path / "out", **changes)) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ")  # below the progress bar of model loading
    assert message in error.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_search_refuses_a_folder_with_other_options_or_other_files(
    checkpoint: Path, found: Path, tmp_path: Path, capsys: Any
) -> None:
    before = {file.name: file.read_bytes() for file in found.iterdir()}
    assert main(arguments(checkpoint, found, trials=8, seed=1)) == 2
    assert "belongs to another search (--trials was 9, is 8, --seed was 0, is 1)" in capsys.readouterr().err
    (tmp_path / "kept").write_text("kept")
    assert main(arguments(checkpoint, tmp_path)) == 2
    assert "holds files that don't belong to a search" in capsys.readouterr().err
    copy = shutil.copytree(found, tmp_path / "copy")
    log = copy / "trials.jsonl"
    header, *entries = log.read_text().splitlines()
    log.write_text("\n".join([json.dumps({**json.loads(header), "validation data": 1}), *entries, ""]))
    assert main(arguments(checkpoint, copy)) == 2
    assert "belongs to another search (validation data was 1, is " in capsys.readouterr().err
    status = (checkpoint / "config.json").stat()
    (checkpoint / "config.json").touch()
    assert main(arguments(checkpoint, found)) == 2
    assert "belongs to another search (files.config.json was" in capsys.readouterr().err
    os.utime(checkpoint / "config.json", ns=(status.st_atime_ns, status.st_mtime_ns))
    log.write_text("{}\n" + "\n".join(entries[1:]))
    assert main(arguments(checkpoint, copy)) == 2
    assert "belongs to another search" in capsys.readouterr().err
    assert before == {file.name: file.read_bytes() for file in found.iterdir()}


def test_a_search_warns_of_validation_data_seen_in_training_and_refuses_missing_data(
    checkpoint: Path, tmp_path: Path, capsys: Any
) -> None:
    data = tmp_path / "e2e"
    data.mkdir()
    rows = [f'"name[Place {n}], area[riverside]","Place {n} is near, {word}."' for n in range(8) for word in "ab"]
    (data / "devset.csv").write_text("\n".join(["mr,ref", *rows]) + "\n")
    trained = shutil.copytree(checkpoint, tmp_path / "checkpoint", ignore=shutil.ignore_patterns(CHECKSUMS_FILE))
    config = SkipConfig.load(trained)
    assert config is not None

    def remember(**options: Any) -> None:
        SkipConfig(config.schedules, config.solver, {"name": "e2e", "options": options}).save(trained)  # type: ignore[union-attr]

    words = {"data-dir": data, "trials": 2, "max-new-tokens": 2}
    remember()
    assert main(arguments(trained, tmp_path / "out", **words)) == 2
    assert "no validation data: split 'validation' of E2E needs" in capsys.readouterr().err
    assert main(arguments(trained, tmp_path / "one", **words, **{"task-option": "holdout=1"})) == 2
    assert "has a single prompt" in capsys.readouterr().err
    assert main(arguments(trained, tmp_path / "seen", **words, **{"task-option": "holdout=3"})) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "WARNING: the checkpoint was trained on 3 of these 3 validation prompts" in said
    assert "WARNING" in (tmp_path / "seen" / "search.md").read_text()
    remember(holdout=3)
    assert main(arguments(trained, tmp_path / "new", **words)) == 0
    assert "WARNING" not in capsys.readouterr().err
    # Some of the five prompts held out now were held out in training too, but never all.
    assert main(arguments(trained, tmp_path / "some", **words, **{"task-option": "holdout=5"})) == 0
    held = [{n * 8 // count for n in range(count)} for count in (3, 5)]
    assert report_of(tmp_path / "some")["trained_on"] == len(held[1] - held[0])


def test_rungs_hold_every_prompt_once_in_batches_of_similar_length() -> None:
    lengths = [random.Random(n).randint(1, 50) for n in range(203)]
    rungs = plan_rungs(lengths, 8, seed=1)
    assert [sum(map(len, rung)) for rung in rungs] == [50, 51, 102]
    assert sorted(n for rung in rungs for batch in rung for n in batch) == list(range(203))
    for rung in rungs:
        assert all(len(batch) == 8 for batch in rung[:-1])
        order = [lengths[n] for batch in rung for n in batch]
        assert order == sorted(order)
    assert plan_rungs(lengths, 8, seed=2) != rungs


def made_up(scores: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[Batch]:
    """One batch with the given ROUGE scores and seconds per step of each trial, full depth first."""
    turns = [
        TrialResult(trial, [[value, 1.0] for value in values], time, layers=1, tokens=1)
        for trial, (values, time) in enumerate(zip(scores, seconds, strict=True), FULL_DEPTH)
    ]
    return [Batch(list(range(len(scores[0]))), turns)]


def winner(scores: Sequence[Sequence[float]], seconds: Sequence[float]) -> int:
    schedules = [SkipSchedule(24, 4 + n, 3) for n in range(len(scores) - 1)]
    return choose_winner(make_rows(schedules, [3.0] * len(schedules), made_up(scores, seconds), "rougeL"))


def test_a_winner_is_significantly_better_and_not_slower() -> None:
    base = [float(n % 7) for n in range(60)]
    lead, noise = [value + 1 + n % 3 for n, value in enumerate(base)], [value + n % 2 for n, value in enumerate(base)]
    unsure = [value + (4 if n % 2 else -3.5) for n, value in enumerate(base)]
    assert winner([base, base, unsure, lead], [3, 1, 1, 1]) == 2
    assert winner([base, base, noise, lead], [3, 1, 1, 1]) == 2  # both are better; trial 2 by more
    assert winner([base, base, unsure, lead], [3, 1, 1, 1.04]) == 2
    assert winner([base, base, unsure, lead], [3, 1, 1, 1.06]) == 0  # slower than the default
    assert winner([base, base, unsure, unsure], [3, 1, 1, 1]) == 0
    assert winner([base, base, base], [3, 1, 1]) == 0
    assert winner([[1.0], [1.0], [2.0]], [3, 1, 1]) == 0  # a single prompt has no standard error
    assert critical_value(1) == pytest.approx(1.96, abs=0.001)
    assert critical_value(19) == pytest.approx(3.01, abs=0.01)


def test_none_of_twenty_equivalent_schedules_wins_by_chance() -> None:
    """With uncorrected intervals one of them would win in two of five searches."""
    wins = 0
    for seed in range(40):
        draw = random.Random(seed)
        prompts = [draw.gauss(60, 15) for _ in range(60)]
        scores = [[value + draw.gauss(0, 5) for value in prompts] for _ in range(21)]
        wins += winner(scores, [3.0] + [1.0] * 20) > 0
    assert wins <= 5


def test_the_better_half_and_at_least_three_schedules_are_kept() -> None:
    batches = made_up([[9.0], [0.0], [5.0], [7.0], [1.0], [8.0], [6.0], [2.0], [3.0]], [1.0] * 9)
    assert better_half(batches, "rougeL") == [0, 1, 2, 4, 5]
    assert better_half(made_up([[9.0], [0.0], [5.0], [7.0], [1.0], [8.0]], [1.0] * 6), "rougeL") == [0, 1, 2, 4]
