"""Bad settings are refused before training; settings that don't affect the weights may change when a run continues."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import SMALL, metrics, train_small, train_small_on
from transformers import TrainingArguments

import train.cli
import train.run
import train.tracking
from skipdecode import ConfigError, SkipSchedule
from train.build import build_task
from train.prepare import make_arguments, prepare
from train.recipe import load_recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.task=e2ee"], "unknown task 'e2ee': did you mean 'e2e'"),
        (["schedule.speedups=[1,90]"], "this model reaches at most"),
        (["model.shape=opt-tny"], "unknown model.shape 'opt-tny': did you mean 'opt-tiny'"),
        (["model.name_or_path=/nowhere/at/all"], "not both"),
        (["model.vocab_size=10"], "model.vocab_size is 10"),
        (["model.config.layerdrop=0.1"], "layerdrop to 0.1, which would randomly skip layers"),
        (["model.config.hidden_size=0"], "hidden_size is 0"),
        (["model.config.max_position_embeddings=40"], "the model has 40"),
        (["data.max_prompt_tokens=3"], "at most 3 are allowed: raise data.max_prompt_tokens"),
        (["schedule.speedups=null", "schedule.files=[LAYERS24]"], "is for 24 layers, the model has 8"),
        (["schedule.speedups=null", "schedule.files=[LOWEST,EVEN]"], "differ in placement (bottom and even)"),
        (["schedule.speedups=null", "schedule.files=[nowhere.json]"], "'nowhere.json' can't be read"),
        (["data.path=/nowhere"], "unknown option of the task 'departures' 'path'"),
        (["data.options={path: x}"], "data.options has the key path: set the folder of the task's files as data.path"),
        (["data.limit=0"], "data.limit is 0"),
        (["deepspeed.config=zero9"], "unknown deepspeed.config 'zero9'"),
        (["lora.r=4", "lora.merge=false"], "lora.merge=false needs model.name_or_path"),
        (["lora.r=0"], "lora.r is 0"),
        (["model.dtype=float16"], "keep model.dtype=float32"),
        (["model.dtype=float16", "train.precision=bf16", "lora.r=4"], "needs a GPU: set model.dtype=bfloat16"),
        (["publish.public=true"], "publish.public is true and publish.repository is null: nothing is published"),
        (["optim.learning_rte=1"], "did you mean 'optim.learning_rate'"),
        (["schedule.default_speedup=9"], "default_speedup is 9: it must lie between 1 and"),
        (["evaluation.speedups=[0.5]"], "evaluation.speedups is [0.5]: Value error, expected distinct targets"),
        (["evaluation.speedups=[1,1]"], "evaluation.speedups is [1, 1]"),
        (["evaluation.speedups=[1,90]"], "the evaluation after training would fail: speedup is 90"),
        (["evaluation.speedups=[1]", "evaluation.max_new_tokens=250"], "the model has 256 positions and max_new"),
    ],
)
def test_bad_settings_give_a_one_line_error_before_training_and_write_nothing(
    overrides: list[str], message: str, tmp_path: Path, capsys: Any
) -> None:
    lowest, even = (SkipSchedule(8, 5, 3, placement=placement) for placement in ("bottom", "even"))
    for name, schedule in {"LAYERS24": SkipSchedule(24, 9, 3), "LOWEST": lowest, "EVEN": even}.items():
        (tmp_path / name).write_text(schedule.to_json())
        overrides = [override.replace(name, str(tmp_path / name)) for override in overrides]
    folder = tmp_path / "run"
    assert train.cli.main(["--recipe", "quickstart", *SMALL, f"output.dir={folder}", *overrides]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ")
    assert message in said
    assert not folder.exists()


def test_other_batch_sizes_get_schedules_of_the_same_kind_as_those_from_files(tmp_path: Path) -> None:
    """The recipe has prompt "max" and placement "top"; the files have others, which the solver must use."""
    files = [tmp_path / f"{layers}.json" for layers in (8, 6, 4)]
    for file, layers in zip(files, (8, 6, 4), strict=True):
        file.write_text(SkipSchedule(8, layers, layers - 1, horizon=20, placement="bottom", warmup_layers=2).to_json())
    recipe = load_recipe("quickstart", [*SMALL, "schedule.speedups=null", f"schedule.files={list(map(str, files))}"])
    prepared = prepare(recipe, build_task(recipe), make_arguments(recipe, tmp_path))
    config, cost = prepared.skip_config, prepared.cost
    speeds = sorted(config.schedules)
    for speedup in (*speeds[1:], sum(speeds[1:]) / 2):  # those of files, and one between
        schedule = config.plan_for(cost, speedup, prompts=[[30]]).schedule
        assert (schedule.placement, schedule.prompt, schedule.warmup_layers) == ("bottom", "full", 2)


def test_a_single_process_with_several_gpus_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ConfigError, match="sees 2 GPUs: start one process for each with torchrun --nproc_per_node 2"):
        train_small(tmp_path / "run", "train.max_steps=1")
    assert not (tmp_path / "run").exists()


def own_data(folder: Path, split: str = "train", completion: str = "it is 5") -> str:
    """Write nine rows of a split of a user's own data. Returns the section of a recipe that names the folder."""
    rows = [{"prompt": f"Jane Doe {n}\n", "completion": completion} for n in range(9)]
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{{task: text, path: {folder}, options: {{prompt_column: prompt, completion_column: completion}}}}"


def test_a_folder_without_a_test_split_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="evaluation after training would fail: split 'test' of text has no file"):
        train_small_on(own_data(tmp_path), tmp_path / "run", "evaluation.speedups=[1]")
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_remembers_no_prompt_of_data_of_ones_own(tmp_path: Path) -> None:
    data = own_data(tmp_path)
    recipe = tmp_path / "own.yaml"
    recipe.write_text(f"model: {{shape: opt-tiny}}\ndata: {data}\nschedule: {{speedups: [1, 2]}}\n")
    own = [override for override in SMALL if not override.startswith("data.")]
    for named, changes in ((str(recipe), own), ("quickstart", SMALL)):
        loaded = load_recipe(named, changes)
        prepared = prepare(loaded, build_task(loaded), make_arguments(loaded, tmp_path))
        assert ("example" in prepared.skip_config.task) == (named == "quickstart")


def test_validation_rows_that_are_longer_than_the_model_are_refused_before_training(tmp_path: Path) -> None:
    data = own_data(tmp_path)
    own_data(tmp_path, "validation", completion=" it" * 60)
    changes = ["model.config.max_position_embeddings=40", "train.validate_rows=4", "schedule.speedups=[1]"]
    with pytest.raises(ConfigError, match="positions, but the model has 40"):
        train_small_on(data, tmp_path / "run", *changes)
    assert not (tmp_path / "run").exists()


def test_settings_that_do_not_affect_the_weights_may_change_when_a_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """In an interrupted run, and in a trained one without its evaluation. The folder's name looks like rich markup."""
    common = ["train.max_steps=6", "model.config.dropout=0.1", "schedule.texts=0"]
    straight = train_small(tmp_path / "straight", *common)
    folder = tmp_path / "a[/b]c:smile:[lr=1e-4]"
    original = train.tracking.MetricsFile.on_log

    def cut_off(self: Any, args: Any, state: Any, *others: Any, **options: Any) -> None:
        original(self, args, state, *others, **options)
        if state.global_step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train.tracking.MetricsFile, "on_log", cut_off)
        with pytest.raises(KeyboardInterrupt):
            train_small(folder, *common)
    changes = ["train.logging_steps=3", "train.save_steps=2", "train.save_total_limit=9"]
    capsys.readouterr()
    train_small(folder, *common, *changes)
    said = capsys.readouterr().err
    assert "continuing with changed settings: train.logging_steps was 1, is 3" in said
    quoted = shlex.quote(str(folder))
    measuring = f"to measure its speedups: python -m eval --checkpoint {quoted}\n"
    assert f"finished: the checkpoint is {folder}; {measuring}" in said
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 6]
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (3, 4, 6)]
    expected = load_file(straight / "model.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in load_file(folder / "model.safetensors").items())
    written = (folder / "model.safetensors").stat().st_mtime_ns
    evaluation = ["evaluation.speedups=[1]", "evaluation.limit=2", "evaluation.max_new_tokens=4"]
    with pytest.raises(ConfigError, match=r"a finished run of another recipe \(train\.per_device_batch_size was 8"):
        train_small(folder, *common, "train.per_device_batch_size=4", *evaluation)
    train_small(folder, *common, *evaluation)
    assert [row["label"] for row in json.loads((folder / "eval" / "report.json").read_text())["rows"]] == ["1x"]
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match="already holds a finished run"):
        train_small(folder, *common, *evaluation)
