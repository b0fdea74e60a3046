"""A run that starts from a GGUF file equals one that starts from the same weights in a plain checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_checkpoints import TASK
from small_runs import SMALL, metrics, train_small
from tiny_gguf import NAME, TITLE, tiny_llama, write_tiny_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

import eval.cli
import skipdecode
import train.cli
import train.trainer
from eval.loading import checkpoint_identity, load_checkpoint
from skipdecode import ConfigError
from train.build import build_model, model_config
from train.recipe import load_recipe

START = ("model.shape=null", "model.config=null", "model.vocab_size=512")
STEPS = ("train.max_steps=4", "train.save_steps=2", "schedule.texts=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("start") / "tiny", *tiny_llama())


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_small(tmp_path_factory.mktemp("finished") / "run", *named(folder), *STEPS)


def named(folder: Path) -> list[str]:
    return [*START, f"model.name_or_path={folder}", f"model.gguf_file={NAME}"]


def same_weights(one: Path, other: Path) -> bool:
    mine, theirs = (load_file(each / "model.safetensors") for each in (one, other))
    return mine.keys() == theirs.keys() and all(value.equal(theirs[name]) for name, value in mine.items())


def without_a_trace(run: Path) -> bool:
    """Whether only the recipe mentions the GGUF file (reports list packages, and code is the library's own)."""
    code = {"eval", "custom_generate"}
    files = {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.parent.name not in code}
    said = {file for file, content in files.items() if b"gguf" in content.lower() or TITLE.encode() in content}
    return said == {run / "recipe.yaml"}


def test_training_from_gguf_gives_the_same_weights_as_from_a_plain_checkpoint(
    folder: Path, finished: Path, tmp_path: Path
) -> None:
    model, tokenizer = skipdecode.load(str(folder), gguf_file=NAME)
    model.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    other = train_small(tmp_path / "run", *START, f"model.name_or_path={tmp_path / 'plain'}", *STEPS)
    assert [line["loss"] for line in metrics(finished)] == [line["loss"] for line in metrics(other)]
    assert same_weights(finished, other)


def test_a_finished_run_from_gguf_is_a_plain_checkpoint(finished: Path) -> None:
    assert without_a_trace(finished)
    model = AutoModelForCausalLM.from_pretrained(finished)
    inputs = AutoTokenizer.from_pretrained(finished)(["vehicle: ferry | to: Saltfern\n"], return_tensors="pt")
    assert model.generate(**inputs, do_sample=False, max_new_tokens=4).shape[1] > inputs["input_ids"].shape[1]
    assert skipdecode.load(str(finished))[0].config.skipdecode["schedules"]


def test_an_interrupted_run_from_gguf_ends_with_the_same_weights(
    folder: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = train.trainer.SkipTrainer.training_step

    def cut_off(trainer: Any, *given: Any, **options: Any) -> Any:
        if trainer.state.global_step == 3:
            raise KeyboardInterrupt
        return step(trainer, *given, **options)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(train.trainer.SkipTrainer, "training_step", cut_off)
        with pytest.raises(KeyboardInterrupt):
            train_small(run, *named(folder), *STEPS)
    assert (run / "checkpoint-2").is_dir()
    assert not (run / "config.json").exists()
    train_small(run, *named(folder), *STEPS)
    assert same_weights(run, finished)


def test_adapters_of_a_dequantised_base_are_merged_into_a_plain_checkpoint(folder: Path, tmp_path: Path) -> None:
    run = train_small(tmp_path / "run", *named(folder), *STEPS, "lora.r=2", "optim.learning_rate=0.03")
    assert without_a_trace(run)
    assert not (run / "adapter").exists()  # adapters can't name a GGUF file as their base model
    written, start = (load_file(run / "model.safetensors"), skipdecode.load(str(folder), gguf_file=NAME)[0])
    changed = {name for name, value in start.state_dict().items() if name in written and not value.equal(written[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj"}


def test_distillation_and_shallow_models_can_start_from_gguf(folder: Path, tmp_path: Path) -> None:
    more = ("optim.distillation=0.5", "model.layers=6", "train.max_steps=2")
    run = train_small(tmp_path / "run", *named(folder), *STEPS, *more)
    assert without_a_trace(run)
    assert AutoModelForCausalLM.from_pretrained(run).config.num_hidden_layers == 6


def test_config_values_of_a_gguf_base_can_be_changed_but_not_its_sizes(folder: Path) -> None:
    def built(change: str) -> Any:
        return build_model(load_recipe("e2e-smollm2-135m", [*named(folder), f"model.config.{change}"]), [])[0]

    assert built("attention_dropout=0.25").config.attention_dropout == 0.25
    with pytest.raises(ConfigError, match="hidden_size can't be changed"):
        built("hidden_size=32")


def test_a_dry_run_reads_a_gguf_file_and_writes_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "run"
    assert train.cli.main(["--recipe", "quickstart", *SMALL, *named(folder), f"output.dir={out}", "--dry-run"]) == 0
    written, _ = tiny_llama()
    assert f"{sum(p.numel() for p in written.parameters()):,}, of which" in capsys.readouterr().out
    assert not out.exists()


def test_the_config_comes_from_the_gguf_file_even_if_its_folder_is_named_like_a_shape(tmp_path: Path) -> None:
    folder = write_tiny_gguf(tmp_path / "opt-1.3b", *tiny_llama(2))
    assert model_config(load_recipe("quickstart", [*START, *named(folder)])).model_type == "llama"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.gguf_file=absent.gguf"], "gguf_file 'absent.gguf': there is no such file in"),
        (["model.gguf_file=''"], "gguf_file is ''"),
        (["model.name_or_path=null"], 'model.gguf_file is "tiny.gguf" and model.name_or_path is null: set the folder'),
        (["model.name_or_path=null", "model.shape=opt-tiny"], "model.name_or_path is null: set the folder"),
        (["model.name_or_path=/nowhere/at/all"], "'/nowhere/at/all' is not a folder"),
        (["lora.r=2", "lora.merge=false"], "model.gguf_file is 'tiny.gguf' with lora.merge=false"),
    ],
)
def test_impossible_gguf_settings_are_refused_before_anything_is_written(
    folder: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        train_small(tmp_path / "run", *named(folder), *overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def test_another_tokenizer_can_replace_that_of_the_gguf_file(folder: Path, finished: Path) -> None:
    recipe = load_recipe("quickstart", [*START, *named(folder), f"model.tokenizer={finished}"])
    assert build_model(recipe, [])[1].name_or_path == str(finished)


def test_a_gguf_file_can_be_evaluated_before_training(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    options = ["--task", "departures", "--limit", "3", "--max-new-tokens", "4", "--speedup", "1", "2"]
    options += ["--task-option", *(f"{key}={value}" for key, value in TASK.items()), "--output", str(tmp_path / "out")]
    assert eval.cli.main(["--checkpoint", str(folder), *options]) == 2
    assert "read its GGUF file tiny.gguf with --gguf-file" in capsys.readouterr().err
    assert eval.cli.main(["--checkpoint", str(folder), "--gguf-file", NAME, *options]) == 0
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    assert [row["speedup_target"] for row in rows] == [1, 2]


def test_an_evaluation_identifies_the_gguf_file_that_it_read(folder: Path) -> None:
    status = (folder / NAME).stat()
    checkpoint = load_checkpoint(str(folder), None, torch.device("cpu"), gguf_file=NAME)
    assert checkpoint_identity(checkpoint) == {NAME: [status.st_size, status.st_mtime_ns]}


@pytest.mark.parametrize("recipe", ["e2e-smollm2-135m", "cnndm-smollm2-135m", "text"])
def test_recipes_of_pretrained_models_train_from_gguf_without_the_hub(
    recipe: str, folder: Path, shared_data: Path, tmp_path: Path
) -> None:
    run, data = tmp_path / "run", shared_data / recipe.removesuffix("-smollm2-135m")
    if recipe == "text":
        data = tmp_path / "data"
        data.mkdir()
        row = {"prompt": "to: Saltfern", "completion": "A ferry goes to Saltfern."}
        (data / "train.jsonl").write_text(12 * (json.dumps(row) + "\n"))
    overrides = [f"model.name_or_path={folder}", f"model.gguf_file={NAME}", f"data.path={data}"]
    overrides += ["data.limit=4", "data.max_completion_tokens=8", "data.max_prompt_tokens=100", "train.max_steps=1"]
    overrides += ["train.per_device_batch_size=2", "schedule.texts=2", "evaluation.limit=2", f"output.dir={run}"]
    overrides += ["evaluation.speedups=[1,2]", "evaluation.max_new_tokens=4", "tracking.wandb=off"]
    overrides += [f"data.cache_dir={tmp_path / 'cache'}"]
    overrides += [] if recipe == "e2e-smollm2-135m" else ["data.options.holdout=4"]
    assert train.cli.main(["--recipe", recipe, *overrides]) == 0
    assert without_a_trace(run)
    assert (run / "order.json").exists()
