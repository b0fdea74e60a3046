"""LoRA: adapters that are trained under a schedule give the same tokens merged and unmerged."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_checkpoints import flip, in_hub_cache
from small_runs import train_small
from transformers import AutoModelForCausalLM, AutoTokenizer

import eval.cli
import train.finish
from skipdecode import ConfigError, SkipSchedule, skip_generate
from skipdecode.checkpoint.checksums import CHECKSUMS_FILE, write_checksums
from skipdecode.checkpoint.loading import load_model
from skipdecode.checkpoint.skip_config import SkipConfig
from train.adapters import add_adapters
from train.recipe import LoraSection

LORA = ["lora.r=4", "lora.alpha=8", "optim.learning_rate=0.03", "train.max_steps=4"]
LORA += ["train.gradient_checkpointing=true", "schedule.texts=0"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_small(tmp_path_factory.mktemp("base") / "run", "train.max_steps=2", "schedule.texts=0")


@pytest.fixture(scope="module")
def apart(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned(base, tmp_path_factory.mktemp("apart") / "run", "lora.merge=false")


def tuned(base: Path, folder: Path, *overrides: str) -> Path:
    start = ("model.shape=null", "model.config=null", f"model.name_or_path={base}")
    return train_small(folder, *start, *LORA, *overrides)


def tokens(model: Any, folder: Path, weights: Any = None) -> torch.Tensor:
    config = SkipConfig.load(folder)
    assert config is not None
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = ["vehicle: ferry | to: Saltfern\n", "vehicle: train | to: Mossford | leaves: 9.40\n"]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    request = {"custom_generate": skip_generate, "schedule": config.schedules[3.0], "weights": weights}
    return model.generate(**inputs, **request, max_new_tokens=24, do_sample=False)


def test_merged_and_apart_give_the_same_tokens(base: Path, apart: Path, tmp_path: Path) -> None:
    merged = tuned(base, tmp_path / "merged")
    assert (merged / "config.json").exists()
    assert not (merged / "adapter_config.json").exists()
    adapters = [load_file(f / "adapter_model.safetensors") for f in (apart, merged / "adapter")]
    assert all(torch.equal(value, adapters[1][name]) for name, value in adapters[0].items())
    assert any(value.abs().max() > 0.01 for name, value in adapters[0].items() if "lora_B" in name)
    plain = AutoModelForCausalLM.from_pretrained(merged)
    assert type(plain).__name__ == "OPTForCausalLM"
    with_adapters = load_model(str(apart))
    assert any("lora_A" in name for name, _ in with_adapters.named_parameters())
    found = tokens(plain, merged)
    assert torch.equal(found, tokens(with_adapters, apart))
    assert torch.equal(found, tokens(load_model(str(merged / "adapter")), merged / "adapter"))
    assert not torch.equal(found, tokens(AutoModelForCausalLM.from_pretrained(base), merged))


@pytest.mark.parametrize("change", ["model.layers=3", "model.config={activation_function: gelu}"])
def test_adapters_of_a_model_that_cannot_be_found_again_are_merged_alone(
    base: Path, change: str, tmp_path: Path
) -> None:
    """Loaded onto the unchanged base model, such adapters would not fit or would give other outputs."""
    run = tuned(base, tmp_path / "run", change, "schedule.speedups=[1]", "train.max_steps=2", "train.save_steps=1")
    model = load_model(str(run))
    assert model.config.num_hidden_layers == (3 if "layers" in change else 8)
    assert not (run / "adapter").exists()
    unfinished = run / "checkpoint-1"
    with pytest.raises(ConfigError, match=r"doesn't name the base model of its adapters .*; load the finished run"):
        load_model(str(unfinished))
    # Earlier versions saved the base model's name.
    file = unfinished / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}))
    (unfinished / CHECKSUMS_FILE).unlink()
    if "layers" in change:
        with pytest.raises(ConfigError, match=r"lacks \d+ of its weights, .* perhaps for some of its layers"):
            load_model(str(unfinished))


def test_a_shallow_run_with_adapters_goes_on_where_it_was(base: Path, tmp_path: Path) -> None:
    shallow = ("model.layers=3", "schedule.speedups=[1]", "train.save_steps=2")
    straight, cut = (tuned(base, tmp_path / name, *shallow) for name in ("straight", "cut"))
    for path in cut.iterdir():
        if path.name not in ("recipe.yaml", "checkpoint-2", "metrics.jsonl"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    tuned(base, cut, *shallow)
    expected, found = (load_file(folder / "model.safetensors") for folder in (straight, cut))
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_a_run_killed_while_its_texts_are_measured_can_be_finished(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    short = ("train.max_steps=1", "schedule.texts=1")
    with monkeypatch.context() as patch:
        patch.setattr(train.finish, "measure_lengths", killed)
        with pytest.raises(KeyboardInterrupt):
            tuned(base, tmp_path / "run", *short)
    assert (tuned(base, tmp_path / "run", *short) / "config.json").exists()


def test_adapters_and_what_they_adapt_are_checked_as_a_whole_model_is(base: Path, apart: Path, tmp_path: Path) -> None:
    folder, model = tmp_path / "apart", tmp_path / "base"
    shutil.copytree(apart, folder)
    shutil.copytree(base, model, ignore=shutil.ignore_patterns("checkpoint-*"))
    weights = folder / "adapter_model.safetensors"
    good = load_file(weights)
    save_file({f"x.{name}": value for name, value in good.items()}, weights)
    with pytest.raises(ConfigError, match=r"is damaged: adapter_model.safetensors has"):
        load_model(str(folder))
    (folder / CHECKSUMS_FILE).unlink()
    with pytest.raises(ConfigError, match=r"lacks [0-9]+ of its weights, such as .*lora_A"):
        load_model(str(folder))
    save_file({name: value + float("nan") for name, value in good.items()}, weights)
    with pytest.raises(ConfigError, match=r"values in .*lora_A.* that aren't finite"):
        load_model(str(folder))
    save_file(good, weights)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(model)}))
    load_model(str(folder))
    flip(model / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{model} is damaged: model.safetensors has changed"):
        load_model(str(folder))


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_adapters_of_shared_weights_are_kept_apart(base: Path, target: str) -> None:
    """Merging an adapter of the embedding would change the LM head too, and the reverse."""
    targets = ["q_proj", target]
    with pytest.raises(ConfigError, match="embedding and LM head share their weights"):
        add_adapters(AutoModelForCausalLM.from_pretrained(base), LoraSection(r=2, target_modules=targets))
    add_adapters(AutoModelForCausalLM.from_pretrained(base), LoraSection(r=2, target_modules=targets, merge=False))
    untied = AutoModelForCausalLM.from_pretrained(base, tie_word_embeddings=False)
    add_adapters(untied, LoraSection(r=2, target_modules=targets))


def test_a_layer_that_is_not_there_is_named(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"is \['fc1', 'q_prj'\]: unknown layer 'q_prj': did you mean 'q_proj'"):
        add_adapters(AutoModelForCausalLM.from_pretrained(base), LoraSection(r=2, target_modules=["fc1", "q_prj"]))


@pytest.mark.parametrize("merge", ["true", "false"])
def test_nothing_is_trained_from_adapters_apart(apart: Path, merge: str, tmp_path: Path) -> None:
    """New adapters would be saved as adapters of the base model, without the old ones."""
    with pytest.raises(ConfigError, match=r"run' holds unmerged adapters, which can't be trained further: merge them"):
        tuned(apart, tmp_path / "run", f"lora.merge={merge}")
    assert not (tmp_path / "run").exists()


def test_adapters_of_a_repository_keep_their_schedules(
    apart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = in_hub_cache(apart, tmp_path, "me/adapters")
    where: dict[str, Any] = {"cache_dir": str(tmp_path), "local_files_only": True}
    where["adapter_kwargs"] = {"cache_dir": str(tmp_path)}  # transformers looks for adapters there
    own = SkipConfig({1.5: SkipSchedule(8, 6, 5)}, {"horizon": 7})  # the base model has other schedules
    own.save(snapshot)
    write_checksums(snapshot)
    assert SkipConfig.of(load_model("me/adapters", **where).config) == own
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("skipdecode.checkpoint.offline._answers", lambda address: False)
    assert SkipConfig.load("me/adapters") == own
    with pytest.raises(ConfigError, match="'me/others' is not a folder, there is no copy of it in the cache"):
        SkipConfig.load("me/others")
    flip(snapshot / "skipdecode.json")
    with pytest.raises(ConfigError, match=r"skipdecode\.json has changed"):
        load_model("me/adapters", **where)


def test_only_adapters_are_trained(base: Path, apart: Path) -> None:
    """The weights merged by peft are those of the base plus the product of the adapters."""
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    adapters = load_file(apart / "adapter_model.safetensors")
    merged = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), apart).merge_and_unload()
    for name, value in merged.state_dict().items():
        expected = before[name]
        key = "base_model.model." + name.removesuffix(".weight") + ".lora_{}.weight"
        if key.format("A") in adapters:
            expected = expected + 8 / 4 * adapters[key.format("B")] @ adapters[key.format("A")]
        torch.testing.assert_close(value, expected)


def test_adapters_apart_are_evaluated(apart: Path, tmp_path: Path) -> None:
    output = tmp_path / "eval"
    arguments = ["--checkpoint", str(apart), "--speedup", "2", "--limit", "4", "--max-new-tokens", "8"]
    assert eval.cli.main([*arguments, "--output", str(output)]) == 0
    assert [row["speedup_target"] for row in json.loads((output / "report.json").read_text())["rows"]] == [1, 2]
