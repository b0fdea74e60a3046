"""Damaged checkpoints, and those that lack weights, are refused by everything that opens one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opening_commands import opening_commands
from safetensors.torch import load_file, save_file
from small_checkpoints import flip, in_hub_cache, save_checkpoint
from small_runs import train_small
from transformers import AutoModelForCausalLM

import skipdecode
from skipdecode import ConfigError
from skipdecode.checkpoint.checksums import CHECKSUMS_FILE, verify_checksums, write_checksums
from skipdecode.checkpoint.loading import load_model, load_tokenizer
from train.publish.parcel import pack

Weights = dict[str, torch.Tensor]
FC1 = "model.decoder.layers.1.fc1.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("original") / "original", 3)
    write_checksums(folder)
    return folder


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "checkpoint")


def change(folder: Path, edit: Callable[[Weights], Any]) -> None:
    """Change the weights of a folder, and remove its checksums."""
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / CHECKSUMS_FILE).unlink(missing_ok=True)


def rename_all(weights: Weights) -> None:
    for name in list(weights):
        weights[f"module.{name}"] = weights.pop(name)


def test_a_checkpoint_loads_also_after_its_readme_and_generation_config_changed(checkpoint: Path) -> None:
    model, tokenizer = skipdecode.load(str(checkpoint))
    assert len(model.model.decoder.layers) == 3
    assert tokenizer.padding_side == "left"
    (checkpoint / "README.md").write_text("mine")
    (checkpoint / "generation_config.json").write_text('{"max_new_tokens": 7}')
    verify_checksums(checkpoint)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda c: flip(c / "model.safetensors", 0.9), "model.safetensors has changed since it was written"),
        (lambda c: flip(c / "tokenizer.json"), "tokenizer.json has changed"),
        (lambda c: (c / "config.json").write_text((c / "config.json").read_text() + " "), "config.json has"),
        (lambda c: (c / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda c: (c / "added_tokens.json").write_text("{}"), "added_tokens.json was added"),
        (lambda c: (c / CHECKSUMS_FILE).write_text('{"config.json": 1}'), f"its {CHECKSUMS_FILE} can't be read"),
    ],
)
def test_a_file_that_changed_since_it_was_written_is_named(checkpoint: Path, damage: Any, reason: str) -> None:
    load_tokenizer(str(checkpoint))
    damage(checkpoint)
    for read in (load_model, load_tokenizer, skipdecode.load):
        with pytest.raises(ConfigError, match=f"is damaged: {reason}.*remove .*{CHECKSUMS_FILE}"):
            read(str(checkpoint))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda w: w.pop(FC1), f"lacks 1 of its weights, such as {FC1}: use an intact copy"),
        (rename_all, "lacks [0-9]+ of its weights, such as .*, and contains module.*"),
        (lambda w: w[FC1][0].fill_(float("nan")), f"values in {FC1} that aren't finite"),
        (lambda w: w[FC1][0, 0].fill_(-float("inf")), f"values in {FC1} that aren't finite"),
        (
            lambda w: w.update({FC1: w[FC1].T.contiguous()}),
            r"of shape \(32, 48\), but its config.json implies \(48, 32",
        ),
        (lambda w: w.update({FC1.replace(".1.", ".3."): w[FC1].clone()}), "contains layers beyond those of its config"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused_also_without_checksums(
    checkpoint: Path, edit: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(checkpoint, edit)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_model(str(checkpoint))
    assert "\n" not in str(caught.value)
    assert "MISSING" not in capsys.readouterr().err  # from transformers' own table of weights


def test_every_command_refuses_a_damaged_checkpoint(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(checkpoint)
    flip(checkpoint / "model.safetensors", 0.9)
    for command in opening_commands(name, tmp_path):
        assert command() == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {name} is damaged: model.safetensors has changed")
        assert error.count("\n") == 1
    start = ["model.shape=null", f"model.name_or_path={name}", "model.config=null"]
    with pytest.raises(ConfigError, match=r"is damaged: model.safetensors has changed"):
        train_small(tmp_path / "run", *start)
    with pytest.raises(ConfigError, match=r"is damaged: model.safetensors has changed"):
        pack(checkpoint, "me/small")
    assert list(tmp_path.iterdir()) == [checkpoint]


def test_an_index_of_shards_outside_the_folder_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / CHECKSUMS_FILE).unlink()
    shutil.move(checkpoint / "model.safetensors", tmp_path / "outside.safetensors")
    names = load_file(tmp_path / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"names '../outside.safetensors': weights must be in the folder itself"):
        load_model(str(checkpoint))


def test_the_checksums_of_a_download_are_verified_for_the_files_that_are_there(original: Path, tmp_path: Path) -> None:
    """The Hub's cache contains only the files that were used so far."""
    snapshot = in_hub_cache(original, tmp_path, "me/small")
    where: dict[str, Any] = {"cache_dir": str(tmp_path), "local_files_only": True}
    (snapshot / "tokenizer.json").rename(tmp_path / "later")
    load_model("me/small", **where)
    (tmp_path / "later").rename(snapshot / "tokenizer.json")
    flip(snapshot / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"is damaged: tokenizer.json has changed"):
        skipdecode.load("me/small", **where)


def test_pickled_weights_are_refused_with_instructions_to_convert_them(checkpoint: Path) -> None:
    torch.save(load_file(checkpoint / "model.safetensors"), checkpoint / "pytorch_model.bin")
    for name in (CHECKSUMS_FILE, "model.safetensors"):
        (checkpoint / name).unlink()
    with pytest.raises(ConfigError, match=r"pickles \(.bin\), .*from_pretrained\(NAME\).save_pretrained\(FOLDER\)"):
        load_model(str(checkpoint))
    AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(checkpoint)
    assert skipdecode.load(str(checkpoint))
