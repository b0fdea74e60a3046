"""An exported checkpoint, without the layers that its schedule never runs, generates the same tokens."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_schedules import schedules
from fastpath_cases import fresh
from hypothesis import given
from hypothesis import strategies as st
from small_checkpoints import save_checkpoint
from tiny_models import TINY_FAMILIES, ragged_prompts, randomised, tiny_config
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

import skipdecode
from skipdecode import ConfigError, SkipSchedule, skip_generate
from skipdecode.checkpoint.export import export, keep_layers, pruned_schedule, standalone_layers
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.cli.options import main

PROMPTS = ["vehicle: ferry | to: Saltfern\n", "vehicle: train | to: Mossford | leaves: 9.40\n"]


@given(schedules(st.integers(2, 40), horizon=30, even=False))
def test_the_schedule_of_a_pruned_model_runs_the_same_layers(drawn: SkipSchedule) -> None:
    schedule = dataclasses.replace(drawn, prompt="max")
    kept, smaller = pruned_schedule(schedule)
    assert smaller.num_layers == len(kept) == schedule.max_layers
    for i in range(schedule.horizon + 3):
        assert tuple(kept[n] for n in smaller.layers_at(i)) == schedule.layers_at(i)
    assert tuple(kept[n] for n in smaller.prompt_layers) == schedule.prompt_layers
    assert tuple(kept[n] for n in smaller.stopped_layers) == schedule.stopped_layers


def test_schedules_whose_layers_cannot_be_removed_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"prompts run all 12 layers .*: train with schedule\.prompt=max"):
        pruned_schedule(SkipSchedule(12, 6, 2))
    spread = SkipSchedule(12, 7, 3, placement="even", prompt="max")
    with pytest.raises(ConfigError, match=r"placement is 'even': its .* differ from those that it chooses"):
        pruned_schedule(spread)
    constant = SkipSchedule(12, 4, 4, placement="even", prompt="max")
    assert pruned_schedule(constant)[0] == constant.layers_for(4)


@pytest.mark.parametrize("family", ["opt", "opt-350m", *TINY_FAMILIES])
def test_a_pruned_model_of_every_family_generates_the_same_tokens(family: str) -> None:
    schedule = SkipSchedule(6, 4, 2, horizon=5, prompt="max")
    ids, mask = ragged_prompts([5, 3], 0)
    request = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    model = fresh(family)
    expected = model.generate(**request, custom_generate=skip_generate, schedule=schedule)
    kept, smaller = pruned_schedule(schedule)
    keep_layers(model, kept)
    assert torch.equal(model.generate(**request, custom_generate=skip_generate, schedule=smaller), expected)


def save_checkpoint_for(folder: Path, **solver: Any) -> Path:
    """A checkpoint whose schedules are solved with these settings."""
    save_checkpoint(folder, 6)
    config = SkipConfig.load(folder)
    assert config is not None
    dataclasses.replace(config, solver={**config.solver, **solver}).save(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint_for(tmp_path_factory.mktemp("prune") / "whole", prompt="max")


def test_an_export_generates_the_same_tokens_and_reports_its_size(
    checkpoint: Path, tmp_path: Path, capsys: Any
) -> None:
    small = tmp_path / "small"
    assert main(["export", str(checkpoint), str(small), "--speedup", "2"]) == 0
    said = capsys.readouterr().out

    def decode(folder: Path) -> torch.Tensor:
        model, tokenizer = skipdecode.load(str(folder))
        inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
        return model.generate(**inputs, custom_generate=skip_generate, speedup=2, max_new_tokens=12)

    assert torch.equal(decode(small), decode(checkpoint))
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (checkpoint, small)]
    whole, model = (skipdecode.load(str(folder))[0] for folder in (checkpoint, small))
    assert f"{model.config.num_hidden_layers} of 6 layers" in said
    share = 1 - model.num_parameters() / whole.num_parameters()
    assert f"({share:.0%} saved)" in said
    assert share == pytest.approx(1 - sizes[1] / sizes[0], abs=0.02)
    assert (small / "custom_generate" / "generate.py").exists()
    assert main(["export", str(checkpoint), str(small), "--speedup", "2"]) == 2
    assert "isn't empty: name a new folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [small]


def test_an_export_changes_no_other_folder_and_leaves_nothing_when_it_fails(
    checkpoint: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "small.partial" / "notes.txt"
    own.parent.mkdir()
    own.write_text("not the export's")
    words = ["export", str(checkpoint), str(tmp_path / "small"), "--speedup", "2"]
    with monkeypatch.context() as patched:
        patched.setattr("skipdecode.checkpoint.export.write_checksums", lambda folder: (folder / "no" / "such").touch())
        assert main(words) != 0
    assert list(tmp_path.iterdir()) == [own.parent]
    assert main(words) == 0
    assert own.read_text() == "not the export's"
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for name in (".", ""):
        capsys.readouterr()
        assert main(["export", str(checkpoint), name, "--speedup", "2"]) == 2
        assert "the folder is '.': name a new folder" in capsys.readouterr().err


class NoTokenizer:
    """A tokenizer that saves no files: the models here take token ids."""

    def save_pretrained(self, folder: Path) -> None: ...


CONSTANT = SkipSchedule(6, 3, 3, prompt="max")
WANTED = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}


def standalone_and_its_tokens(model: Any, folder: Path) -> tuple[Any, torch.Tensor]:
    """The export as loaded by plain transformers, and what the complete model generates with the schedule."""
    ids, mask = ragged_prompts([5, 3], 0)
    request = {"attention_mask": mask, "custom_generate": skip_generate, "schedule": CONSTANT}
    expected = model.generate(ids, **request, **WANTED)
    tokenizer: Any = NoTokenizer()
    export(model, tokenizer, CONSTANT, 2.0, folder, standalone=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), expected


@pytest.mark.parametrize("family", ["opt", "opt-350m", *TINY_FAMILIES])
def test_a_standalone_model_of_every_family_generates_the_same_tokens_in_plain_transformers(
    family: str, tmp_path: Path
) -> None:
    # transformers' BLOOM computes its softmax in float32, where float64's mask value overflows.
    model = fresh(family) if family == "bloom" else fresh(family).double()
    plain, expected = standalone_and_its_tokens(model, tmp_path / "plain")
    ids, mask = ragged_prompts([5, 3], 0)
    assert plain.dtype == model.dtype
    assert plain.config.num_hidden_layers == 3
    assert torch.equal(plain.generate(input_ids=ids, attention_mask=mask, **WANTED), expected)


@pytest.mark.parametrize("family", ["opt", "llama", "gpt2"])
def test_a_standalone_model_generates_the_same_tokens_with_continuous_batching(family: str, tmp_path: Path) -> None:
    plain, expected = standalone_and_its_tokens(fresh(family).double(), tmp_path / "plain")
    ids, mask = ragged_prompts([5, 3], 0)
    prompts = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    config = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=1)
    # By default it takes a fraction of the memory.
    small = ContinuousBatchingConfig(block_size=32, num_blocks=8, max_batch_tokens=32)
    found = plain.generate_batch(prompts, config, small, warmup=False)
    assert [output.generated_tokens for output in found.values()] == expected[:, 5:].tolist()


def test_each_remaining_layer_keeps_its_sliding_window(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    config = tiny_config("qwen2", **TINY_FAMILIES["qwen2"], **window)
    plain, expected = standalone_and_its_tokens(randomised(config, 3).double(), tmp_path / "plain")
    assert CONSTANT.prompt_layers == (0, 4, 5)
    assert plain.config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    assert plain.config.max_window_layers == 1
    ids, mask = ragged_prompts([5, 3], 0)
    assert torch.equal(plain.generate(input_ids=ids, attention_mask=mask, **WANTED), expected)


@given(schedules(st.integers(1, 20), horizon=12))
def test_a_standalone_model_has_the_layers_that_every_token_runs_and_is_refused_where_they_differ(
    schedule: SkipSchedule,
) -> None:
    sets = {
        schedule.prompt_layers,
        schedule.prompt_layers[: schedule.prompt_stop],
        *(schedule.layers_at(i) for i in range(20)),
    }
    if len(sets) == 1:
        assert standalone_layers(schedule) in sets
    else:
        train = r"train with schedule\.(decay=constant and schedule\.prompt=max|prompt_stop=null)"
        with pytest.raises(ConfigError, match=train):
            standalone_layers(schedule)


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint_for(tmp_path_factory.mktemp("constant") / "whole", prompt="max", decay="constant")


def test_a_standalone_export_is_a_plain_checkpoint(
    checkpoint: Path, constant: Path, tmp_path: Path, capsys: Any
) -> None:
    assert main(["export", str(constant), str(tmp_path / "plain"), "--speedup", "2", "--standalone"]) == 0
    assert "as a plain model" in capsys.readouterr().out
    files = {path.name for path in (tmp_path / "plain").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    assert "custom_generate" not in files
    assert not any("skipdecode" in path.read_text() for path in (tmp_path / "plain").glob("*.json"))
    assert main(["export", str(checkpoint), str(tmp_path / "falls"), "--speedup", "2", "--standalone"]) == 2
    said = capsys.readouterr().err
    assert "generated tokens" in said
    assert "schedule.decay=constant" in said
    assert not (tmp_path / "falls").exists()


def test_exporting_unmerged_adapters_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = fresh("opt")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    tokenizer: Any = NoTokenizer()
    with pytest.raises(ConfigError, match=r"adapters aren.t merged .*: merge them \(lora\.merge=true\)"):
        export(model, tokenizer, CONSTANT, 2.0, tmp_path / "plain", standalone=True)
    assert not (tmp_path / "plain").exists()


def test_ctranslate2_generates_the_same_tokens_from_a_standalone_export(constant: Path, tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    plain = tmp_path / "plain"
    assert main(["export", str(constant), str(plain), "--speedup", "2", "--standalone"]) == 0
    ctranslate2.converters.TransformersConverter(str(plain)).convert(str(tmp_path / "converted"))
    model, tokenizer = skipdecode.load(str(constant))
    generator = ctranslate2.Generator(str(tmp_path / "converted"), intra_threads=1)
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        asked = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
        output = model.generate(**inputs, **asked, custom_generate=skip_generate, speedup=2)
        ids = inputs["input_ids"][0].tolist()
        how = {"max_length": 12, "min_length": 12, "sampling_topk": 1, "include_prompt_in_result": False}
        found = generator.generate_batch([tokenizer.convert_ids_to_tokens(ids)], **how)
        assert found[0].sequences_ids[0] == output[0, len(ids) :].tolist()
