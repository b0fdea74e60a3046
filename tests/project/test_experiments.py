"""Experiments train, evaluate and show their variants; every baseline trains and decodes."""

import concurrent.futures
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
from finished_runs import write_run
from small_checkpoints import save_checkpoint
from small_runs import SMALL, metrics
from tiny_models import ragged_prompts
from transformers import AutoModelForCausalLM

import eval.output
import train.run
from data.departures import Departures
from eval.output import only_writer
from scripts.experiments import baselines, runner, settings
from scripts.experiments.baselines import BASELINES, Baseline
from scripts.experiments.runner import SPEEDS, Experiment, resolve, run_unfinished
from scripts.experiments.variants import Variants
from skipdecode import ConfigError, CostModel, SkipSchedule, skip_generate
from skipdecode.checkpoint.skip_config import SkipConfig
from train.recipe import load_recipe
from train.run import run

# The objective of e2e-tiny, on a shape with enough layers for three warm-up layers.
SETTINGS = [*SMALL, "schedule.sampling=sandwich", "optim.distillation=1.0", "schedule.speedups=[1,2]"]
SETTINGS += ["data.options={train_size: 12, validation_size: 4, test_size: 4}", "train.max_steps=2"]
SPREADS = ["--settings", "schedule.spread=0", "schedule.spread=0.5", "--seeds", "0", "1", "--over", "all"]


@pytest.fixture(scope="module")
def variants() -> Variants:
    return Variants("quickstart", tuple(SETTINGS))


# Tested before a release: baselines that differ from another one by a number, or by a decay that test_schedule.py
# tests.
LONG = ("skipdecode-power", "skipdecode-exponential", "skipdecode-cosine", "skipdecode-step", "warmup-3", "shallow-3x")
LONG += ("shallow-4x",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.release if name in LONG else ()) for name in BASELINES]
)
def test_a_baseline_trains_and_its_checkpoint_decodes(
    name: str, variants: Variants, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        train.run, "draw_schedules", lambda path, schedules: path.touch()
    )  # drawing takes half of the time
    overrides = BASELINES[name].resolve(variants)
    sampler = variants.sampler(overrides)
    run(variants.recipe([*overrides, f"output.dir={tmp_path / name}"]), name)
    assert [line["step"] for line in metrics(tmp_path / name)] == [1, 2]
    config = SkipConfig.load(tmp_path / name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
    assert config is not None
    assert dict(config.schedules) == dict(zip(sampler.speedups, sampler.schedules, strict=True))
    target = 1.0 if name.startswith("shallow") else 2.0
    schedule = config.plan_for(CostModel.of(model), target).schedule
    ids, mask = ragged_prompts([4, 6], seed=0)
    made = {"custom_generate": skip_generate, "schedule": schedule, "max_new_tokens": 3, "do_sample": False}
    assert model.generate(ids, attention_mask=mask, **made).shape[1] > 6


def test_the_documentation_lists_the_baselines_and_their_settings() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "research" / "baselines.md").read_text(encoding="utf-8")
    for name, baseline in BASELINES.items():
        line = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        for override in baseline.overrides:
            if override not in baselines.FULL_DEPTH:
                assert f"`{override}`" in line, override


@pytest.mark.parametrize("over", ["all", "decode"])
def test_a_shallow_model_has_the_number_of_layers_whose_cost_is_nearest_to_the_target(over: str) -> None:
    """The cost is that of whole batches, which run until their longest sequence has ended."""
    falling = ("schedule.decay=linear", "schedule.batch_size=32")
    variants = Variants("quickstart", (*SETTINGS, f"schedule.over={over}", *falling))
    config = variants.prepared.skip_config
    config.solver["lengths"] = [[8, 900], [48, 100]]  # type: ignore[index]

    def seconds(layers: int) -> float:
        cost = config.cost_for(variants.cost([f"model.layers={layers}"]))
        return cost.seconds(SkipSchedule.full_depth(layers), over=over)  # type: ignore[arg-type]

    layers = variants.cost().num_layers
    whole = seconds(layers)
    for target in (1.0, 1.3, 1.6, 2.0, 3.0, 4.0):
        found = [abs(math.log(whole / seconds(fewer) / target)) for fewer in range(1, layers + 1)]
        assert Baseline("", as_fast_as=target).resolve(variants) == (f"model.layers={found.index(min(found)) + 1}",)


def test_an_unreachable_target_is_refused_before_anything_runs(variants: Variants) -> None:
    with pytest.raises(ConfigError, match="reaches at most"):
        Baseline("", as_fast_as=50).resolve(variants)


def commands(folder: Path, **statuses: int) -> dict[Path, list[str]]:
    """Commands that create their folder, which must not exist, and exit with a given status."""
    code = "import os, sys; os.mkdir(sys.argv[1]); sys.exit(int(sys.argv[2]))"
    return {folder / name: ["-c", code, str(folder / name), str(status)] for name, status in statuses.items()}


def test_after_ctrl_c_no_further_command_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(started: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_unfinished(commands(tmp_path, first=0, second=0, third=0), "mark", 1)
    assert not (tmp_path / "third").exists()


def test_sigterm_stops_the_running_command_and_starts_no_further_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training saves a checkpoint on SIGTERM, so it must neither continue alone nor be killed."""
    code = "import pathlib, signal, sys, time; folder = pathlib.Path(sys.argv[1])\n"
    code += "def end(*_): (folder / 'ended').touch(); sys.exit(143)\n"
    code += "signal.signal(signal.SIGTERM, end); folder.mkdir(); time.sleep(300)"
    folders = [tmp_path / name for name in ("first", "second", "third")]

    def terminated(started: Any) -> Iterator[Any]:
        while not all(folder.exists() for folder in folders[:2]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        yield from concurrent.futures.as_completed(started)

    monkeypatch.setattr(runner, "as_completed", terminated)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run_unfinished({folder: ["-c", code, str(folder)] for folder in folders}, "mark", 2)
    assert ended.value.code == 143
    assert [(folder / "ended").exists() for folder in folders] == [True, True, False]
    assert not folders[2].exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_also_stops_a_command_that_is_just_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process starts after the first one got SIGTERM."""
    code = "import os, sys, time; os.mkdir(sys.argv[1]); time.sleep(20); os.mkdir(sys.argv[1] + '.end')"
    folders = [tmp_path / name for name in ("first", "second")]
    terminate, told = subprocess.Popen.terminate, threading.Event()

    def terminated(process: Any) -> None:
        terminate(process)
        told.set()

    def write_atomically(path: Path, text: str) -> None:
        if path.name.startswith("second"):
            told.wait(20)

    def ask(started: Any) -> Iterator[Any]:
        while not folders[0].exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        yield from concurrent.futures.as_completed(started)

    monkeypatch.setattr(subprocess.Popen, "terminate", terminated)
    monkeypatch.setattr(runner, "write_atomically", write_atomically)
    monkeypatch.setattr(runner, "as_completed", ask)
    with pytest.raises(SystemExit):
        run_unfinished({folder: ["-c", code, str(folder)] for folder in folders}, "mark", 2)
    assert not list(tmp_path.glob("*.end"))


def start(experiment: ModuleType, *words: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script", "--recipe", "quickstart", *SETTINGS, *words])
        return int(experiment.main())


def test_a_variant_that_was_finished_with_other_settings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_python(command: list[str], log: Path, seconds: Path) -> int:
        folder = Path(command[-1].removeprefix("output.dir="))
        if command[0] == "train.py":
            folder.mkdir()
            (folder / "config.json").write_text("{}")
        else:
            write_run(folder, speedups=SPEEDS)
        return 0

    monkeypatch.setattr(runner, "run_python", run_python)
    monkeypatch.setattr(runner, "show", lambda *_: None)
    output = tmp_path / "out"
    words = ["--settings", "data.options.test_size=4", "--seeds", "0", "--output"]
    assert start(settings, *words, str(output)) == 0
    moved = output.rename(tmp_path / "moved")
    assert start(settings, *words, str(moved)) == 0
    with pytest.raises(ConfigError, match=r"seed-0 was made with other settings \(train.max_steps was 2, is 1\)"):
        start(settings, *words, str(moved), "train.max_steps=1")
    with pytest.raises(ConfigError, match=r"other settings \(--limit was None, is 3\)"):
        start(settings, *words, str(moved), "--limit", "3")
    (moved / "evaluated" / "data.options.test_size=4-seed-0.command.json").unlink()  # earlier versions wrote none
    assert start(settings, *words, str(moved), "--limit", "3") == 0


def test_every_setting_is_trained_with_every_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[str]] = []

    def run_python(command: list[str], log: Path, seconds: Path) -> int:
        found.append([word for word in command if word.startswith(("optim.warmup_steps=", "train.save_steps="))])
        return 0

    monkeypatch.setattr(runner, "run_python", run_python)
    words = ["--settings", "optim.warmup_steps={seed}", "--seeds", "1", "2", "--train-only"]
    assert start(settings, *words, "--output", str(tmp_path), "train.save_steps={seed}") == 0
    assert [[word.rpartition("=")[2] for word in words[-2:]] for words in found] == [["1", "1"], ["2", "2"]]


def test_overrides_after_the_option_settings_are_refused_before_training(tmp_path: Path) -> None:
    words = ["--output", str(tmp_path), "--seeds", "0", "--settings", "optim.warmup_steps=1", "schedule.speedups=null"]
    with pytest.raises(ConfigError, match="need exactly one of speedups"):
        start(settings, *words)
    assert not list(tmp_path.iterdir())


def test_the_table_lists_all_schedules_that_differ_between_seeds(tmp_path: Path) -> None:
    report = write_run(tmp_path / "run", speedups=(1.0, 2.0))
    other = SkipSchedule(8, 5, 3, horizon=16, prompt="max").to_dict()
    beside = replace(report, rows=[report.rows[0], replace(report.rows[1], schedule=other)])
    lines = settings.cells([report, beside, report], [])
    assert [line[:3] for line in lines] == [["1x", "8", "8 to 8"], ["2x", "8, 5", "4 to 4, 5 to 3"]]


def test_a_target_between_two_tables_is_listed_in_exactly_one(tmp_path: Path) -> None:
    report = write_run(tmp_path / "run", speedups=(1.0, 3.5))
    assert "\n".join(baselines.tables(Mock(), {"d3": report})).count("d3 (3.5x)") == 1


def test_finished_variants_are_not_run_again_and_failed_ones_are_named_while_others_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "finished").mkdir()
    (tmp_path / "finished" / "mark").touch()
    assert run_unfinished(commands(tmp_path, finished=0, first=0), "mark", 2)
    assert not run_unfinished(commands(tmp_path, broken=2, last=0), "mark", 1)
    assert (tmp_path / "first").exists()
    assert (tmp_path / "last").exists()
    assert "broken failed with status 2: see broken.log" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("experiment", "words", "labels"),
    [
        (baselines, ["--only", "d3", "shallow-2x", "early-exit", "full-depth"], ["early-exit, calm", "shallow-2x"]),
        (
            settings,
            SPREADS,
            ["| schedule.spread=0 | 4x |", "=0.5 | 4x | 8 | 2 to 2 | 4.08x | 3.06x | 67.10 [67.10, 67.10] |"],
        ),
    ],
)
def test_an_experiment_trains_and_evaluates_its_variants_and_writes_a_table_and_a_picture(
    experiment: ModuleType, words: list[str], labels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []

    def run_unfinished(commands: Mapping[Path, Sequence[str]], mark: str, at_a_time: int) -> bool:
        for folder, command in commands.items():
            if mark == "config.json":
                folder.mkdir()
                (folder / mark).write_text("{}")
                trained.append(folder.name)
                load_recipe(command[2], command[3:])
            else:
                write_run(folder, speedups=(1.0, 2.0, 3.0, 4.0))
        return True

    monkeypatch.setattr(runner, "run_unfinished", run_unfinished)
    metrics_of_task = (*Departures.metrics, "slot_error_rate")
    monkeypatch.setattr(Departures, "metrics", metrics_of_task)  # the metrics in the reports
    assert start(experiment, *words, "--output", str(tmp_path / "out")) == 0
    name = experiment.__name__.rpartition(".")[2]
    text = (tmp_path / "out" / f"{name}.md").read_text()
    assert all(label in text for label in labels)
    assert (tmp_path / "out" / f"{name}.png").stat().st_size > 10_000
    assert len(trained) == 4
    assert not (tmp_path / "out" / ".lock").exists()


def test_the_time_of_an_experiment_includes_interrupted_commands(tmp_path: Path) -> None:
    code = "import sys, time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nsys.exit(1)"
    for _ in range(2):
        assert not run_unfinished({tmp_path / "run": ["-c", code]}, "mark", 1)
    ((core, clock),) = runner.spent_in(tmp_path).values()
    assert 0.6 <= core <= clock + 0.1


def test_only_accepts_a_variant_whose_name_is_an_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []
    monkeypatch.setattr(
        runner, "run_unfinished", lambda commands, *_: not trained.extend(each.name for each in commands)
    )
    words = ["--only", "schedule.spread=0 seed 1", "train.max_steps=1", "--train-only"]
    assert start(settings, *SPREADS, "--output", str(tmp_path), *words) == 0
    assert trained == ["schedule.spread=0-seed-1"]


def test_variants_that_cannot_be_trained_are_skipped_unless_requested(
    variants: Variants, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"small": lambda _: ["model.layers=6"], "large": lambda _: ["model.layers=99"]}
    experiment = Experiment("sizes", "sizes", sizes, lambda variants, reports: [])
    assert list(resolve(experiment, variants, [])) == ["small"]
    assert "large is skipped: model.layers is 99" in capsys.readouterr().err
    for name, message in (("large", "model.layers is 99"), ("smal", "did you mean 'small'")):
        with pytest.raises(ConfigError, match=message):
            resolve(experiment, variants, [name])


def test_two_experiments_cannot_write_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval.output, "LOCK_TIMEOUT", 0.1)
    with only_writer(tmp_path, "--output"), pytest.raises(ConfigError, match="another run is writing here"):
        start(settings, *SPREADS, "--output", str(tmp_path))


def test_data_path_as_an_override_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data-dir"):
        start(settings, *SPREADS, "--output", str(tmp_path / "out"), "data.path=somewhere")
    assert not (tmp_path / "out").exists()


def test_the_losses_of_a_run_come_from_its_last_validation(tmp_path: Path) -> None:
    assert settings.last_losses(tmp_path) == {}
    lines = [{"step": 1, "eval_loss": 3.0, "eval_loss_1x": 2.5}, {"step": 2, "eval_loss_1x": 1.25, "eval_loss_4x": 1.5}]
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert settings.last_losses(tmp_path) == {"1x": "1.250", "4x": "1.500"}


def test_each_seeds_trained_model_replaces_the_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe itself also needs a model, which must come from an override with a seed."""
    found: list[list[str]] = []
    monkeypatch.setattr(runner, "run_python", lambda command, *_: found.append(list(command)) or 1)
    for seed in (0, 1):
        save_checkpoint(tmp_path / f"base-{seed}", 8, max_position_embeddings=256)
    start(
        settings,
        "--settings",
        "train.max_steps=1",
        "--seeds",
        "0",
        "1",
        "--output",
        str(tmp_path / "out"),
        "model.shape=null",
        "model.config=null",
        "model.vocab_size=512",
        f"model.name_or_path={tmp_path}/base-{{seed}}",
    )
    last = [[word for word in command if word.startswith("model.name_or_path=")][-1] for command in found]
    assert last == [f"model.name_or_path={tmp_path}/base-{seed}" for seed in (0, 1)]
