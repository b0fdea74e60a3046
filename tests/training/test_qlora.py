"""QLoRA: adapters are trained on a base in 4 bits, which stays as it is, and decode on it and merged into it."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import small_recipe, train_small
from tiny_models import ragged_prompts, tiny_family
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments

import skipdecode.checkpoint.four_bit
import train.build
from skipdecode import ConfigError, Engine, load, skip_generate
from skipdecode.checkpoint.four_bit import dequantise, nf4
from skipdecode.checkpoint.loading import load_model
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.families import unwrap
from skipdecode.generate.fast_path import fast_path
from skipdecode.schedule.cost import CostModel, count_parameters
from skipdecode.training import SkipTrainingMixin
from train.build import build_task, model_config
from train.dry_run.memory import heaviest_step
from train.prepare import make_arguments, make_trainer, prepare

pytest.importorskip("bitsandbytes", reason="needs the extra qlora")

QLORA = ["model.quantize=nf4", "lora.r=4", "lora.alpha=8", "optim.learning_rate=0.03", "train.max_steps=4"]
QLORA += ["schedule.texts=0"]
LORA = peft.LoraConfig(r=4, task_type="CAUSAL_LM")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_small(tmp_path_factory.mktemp("base") / "run", "train.max_steps=2", "schedule.texts=0")


@pytest.fixture(scope="module")
def apart(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned(base, tmp_path_factory.mktemp("apart") / "run", "lora.merge=false", "train.save_steps=2")


def on(base: Path) -> list[str]:
    return ["model.shape=null", "model.config=null", f"model.name_or_path={base}", *QLORA]


def tuned(base: Path, folder: Path, *overrides: str) -> Path:
    return train_small(folder, *on(base), *overrides)


def stored(model: Any) -> dict[str, torch.Tensor]:
    """All weights but the adapters', with the scales of those in 4 bits."""
    found = unwrap(model).state_dict()
    return {
        name.replace(".base_layer.", "."): value.clone().view(-1).view(torch.uint8)
        for name, value in found.items()
        if "lora_" not in name
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def tokens(model: Any, folder: Path, speedup: float = 3.0) -> torch.Tensor:
    config = SkipConfig.load(folder)
    assert config is not None
    ids = torch.arange(5, 29).view(2, 12)
    request = {"custom_generate": skip_generate, "schedule": config.schedules[speedup]}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **request, max_new_tokens=24, do_sample=False)


def test_training_and_validation_leave_the_base_in_4_bits_unchanged_bit_for_bit(base: Path, tmp_path: Path) -> None:
    recipe = small_recipe(*on(base), "train.validate_rows=4", "train.save_steps=2", f"output.dir={tmp_path / 'run'}")
    prepared = prepare(recipe, build_task(recipe), make_arguments(recipe, tmp_path / "run"))
    before = stored(prepared.model)
    assert sum("nf4" in name for name in before) == 8 * 6, "attention and feed-forward network of eight layers"
    trainer = make_trainer(recipe, prepared, [])
    trainer.train()
    assert same(stored(prepared.model), before)
    trained = {name: p for name, p in prepared.model.named_parameters() if p.requires_grad}
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    assert any(p.abs().max() > 0.01 for name, p in trained.items() if "lora_B" in name)
    trainer.save_model(str(tmp_path / "saved"))
    assert same(stored(load_model(str(tmp_path / "saved"))), before)


def test_adapters_decode_on_their_base_in_4_bits_as_they_do_merged(base: Path, apart: Path, tmp_path: Path) -> None:
    merged = tuned(base, tmp_path / "merged")
    assert "4 bits" in (merged / "README.md").read_text()
    plain = AutoModelForCausalLM.from_pretrained(merged)
    assert not hasattr(plain.config, "quantization_config")
    assert type(plain.model.decoder.layers[0].fc1) is torch.nn.Linear
    found = tokens(plain, merged)
    assert torch.equal(found, tokens(load_model(str(apart)), apart))
    assert torch.equal(found, tokens(load(str(merged / "adapter"))[0], merged / "adapter"))
    assert not hasattr(load_model(str(apart), quantization_config=None).config, "quantization_config")
    assert not torch.equal(found, tokens(AutoModelForCausalLM.from_pretrained(base), merged))
    both = [
        json.loads((folder / name).read_text())
        for folder, name in ((apart, "skipdecode.json"), (merged, "config.json"))
    ]
    assert both[0]["base_weights"] == {"quantize": "nf4", "dtype": "float32"}
    assert "base_weights" not in both[1]["skipdecode"]


def on_4_bits(base: Path, **changes: Any) -> Any:
    """The base with adapters, as a script of the user's own loads it."""
    config = BitsAndBytesConfig(**{**nf4(torch.float32).to_dict(), **changes})
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=config)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = True  # as on CPUs that have these instructions
    return peft.get_peft_model(model, LORA)


def own_trainer(model: Any, folder: Path) -> SkipTrainingMixin:
    rows = [{"prompt_ids": [5 + n, 6, 7], "completion_ids": [8, 9 + n, 10, 11]} for n in range(8)]
    arguments = TrainingArguments(str(folder), max_steps=4, learning_rate=0.1, use_cpu=True, report_to=[])
    return SkipTrainingMixin(model, arguments, train_dataset=rows, speedups=(1, 3))


def test_an_own_trainer_saves_adapters_that_decode_on_the_base_in_4_bits_as_trained(base: Path, tmp_path: Path) -> None:
    model = on_4_bits(base)
    before = stored(model)
    trainer = own_trainer(model, tmp_path)
    trainer.train()
    assert same(stored(model), before)
    trainer.save_model()
    assert trainer.skip_config.base_weights == {"quantize": "nf4", "dtype": "float32"}
    found = load_model(str(tmp_path))
    assert same(stored(found), before)
    assert torch.equal(tokens(found, tmp_path), tokens(model.eval(), tmp_path))
    assert same(stored(model), before), "decoding stores no weight anew"
    as_stored = own_trainer(peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), LORA), tmp_path / "plain")
    assert as_stored.skip_config.base_weights is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type='fp4': it must be 'nf4'"),
        ({"bnb_4bit_use_double_quant": False}, "bnb_4bit_use_double_quant=False: it must be True"),
        ({"llm_int8_skip_modules": ["fc1", "lm_head"]}, r"llm_int8_skip_modules=\['fc1', 'lm_head'\]: it must be None"),
    ],
)
def test_a_base_that_could_not_be_loaded_again_is_refused_before_training(
    base: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        own_trainer(on_4_bits(base, **changes), tmp_path)


def test_adapters_on_4_bits_decode_at_full_depth_as_generate_does(apart: Path) -> None:
    model, _ = load(str(apart))
    ids = torch.arange(5, 29).view(2, 12)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    before = stored(model)
    assert torch.equal(tokens(model, apart, 1.0), expected)
    assert same(stored(model), before), "decoding stores no weight anew"


def test_what_the_fast_path_alone_decodes_is_refused_by_name_on_4_bits(apart: Path) -> None:
    model, tokenizer = load(str(apart))
    assert fast_path(model).why_not() == "its weights are quantised (bitsandbytes)"
    ids = torch.arange(5, 29).view(2, 12)
    for options in ({"weights": "int8"}, {"lossless": True}):
        with pytest.raises(ConfigError, match=r"its weights are quantised \(bitsandbytes\)"):
            model.generate(ids, custom_generate=skip_generate, speedup=3, **options)
    with pytest.raises(ConfigError, match=r"an engine can't decode .* quantised \(bitsandbytes\)"):
        Engine(model, tokenizer)


def test_a_stopped_run_on_4_bits_ends_with_the_same_adapters(base: Path, apart: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(apart, cut)
    for path in cut.iterdir():
        if path.name not in ("recipe.yaml", "checkpoint-2", "metrics.jsonl"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    tuned(base, cut, "lora.merge=false", "train.save_steps=2")
    expected, found = (load_file(folder / "adapter_model.safetensors") for folder in (apart, cut))
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "llama", "bloom"])
def test_a_dequantised_model_computes_the_same_and_is_a_plain_checkpoint(model_type: str, tmp_path: Path) -> None:
    """GPT-2 stores its projections transposed."""
    ids, mask = ragged_prompts([7, 4], seed=0)
    tiny_family(model_type).save_pretrained(tmp_path / "base")
    model: Any = load_model(str(tmp_path / "base"), torch.float32, quantization_config=nf4(torch.float32)).eval()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        dequantise(model)
        model.save_pretrained(tmp_path / "plain")
        found = load_model(str(tmp_path / "plain")).eval()(ids, attention_mask=mask).logits
    torch.testing.assert_close(found, expected)


def test_the_dry_run_estimates_the_bytes_of_the_weights_in_4_bits(base: Path, tmp_path: Path) -> None:
    recipe = small_recipe(*on(base), "model.dtype=bfloat16", f"output.dir={tmp_path / 'run'}")
    prepared = prepare(recipe, build_task(recipe), make_arguments(recipe, tmp_path / "run"))
    lengths = {"prompt_columns": 8, "new_tokens": 8}
    _, simulated = heaviest_step(recipe, prepared.model.config, prepared.sampler, **lengths)
    parameters = list(prepared.model.parameters())
    assert simulated.parameters == count_parameters(parameters)
    assert simulated.trainable == sum(p.numel() for p in parameters if p.requires_grad)
    assert simulated.four_bit == sum(2 * p.numel() for p in parameters if hasattr(p, "quant_state"))
    states = [p.quant_state for p in parameters if hasattr(p, "quant_state")]
    scales = [s for state in states for s in (state.absmax, state.code, state.state2.absmax, state.state2.code)]
    assert simulated.weights == sum(tensor.nbytes for tensor in (*parameters, *scales))
    whole = small_recipe(*on(base), "model.dtype=bfloat16", "model.quantize=null")
    _, plain = heaviest_step(whole, model_config(whole), prepared.sampler, **lengths)
    assert simulated.parameters == plain.parameters
    assert simulated.weights < plain.weights
    sizes = CostModel.of(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16))
    quantised = load_model(str(base), torch.bfloat16, quantization_config=nf4(torch.bfloat16))
    assert CostModel.of(quantised) == sizes, "schedules are solved for the merged model"


def test_what_cannot_be_had_with_4_bits_is_refused(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"model\.quantize is 'nf4' with model\.gguf_file 'a\.gguf'"):
        tuned(base, run, "model.gguf_file=a.gguf")
    with monkeypatch.context() as patch:
        patch.setattr(train.build, "is_deepspeed_zero3_enabled", lambda: True)
        with pytest.raises(ConfigError, match=r"model\.quantize is 'nf4' with ZeRO-3, which can't shard"):
            tuned(base, run)
    with monkeypatch.context() as patch:
        patch.setattr(skipdecode.checkpoint.four_bit, "is_bitsandbytes_available", lambda: False)
        with pytest.raises(ConfigError, match=r"need bitsandbytes: pip install 'skipdecode\[qlora\]'"):
            tuned(base, run)
    assert not run.exists()


def test_damage_is_found_in_what_is_read_in_4_bits(base: Path, apart: Path, tmp_path: Path) -> None:
    folder = Path(
        shutil.copytree(base, tmp_path / "base", ignore=shutil.ignore_patterns("checkpoint-*", "complete.json"))
    )
    weights = load_file(folder / "model.safetensors")
    weights["model.decoder.layers.3.fc1.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"values in model\.decoder\.layers\.3\.fc1\.weight that aren't finite"):
        load_model(str(folder), quantization_config=nf4(torch.float32))
    adapters = Path(
        shutil.copytree(apart, tmp_path / "apart", ignore=shutil.ignore_patterns("checkpoint-*", "complete.json"))
    )
    values = json.loads((adapters / "skipdecode.json").read_text()) | {"base_weights": {"quantize": "nf5"}}
    (adapters / "skipdecode.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"skipdecode\.json: base_weights is \{'quantize': 'nf5'\}: expected"):
        load_model(str(adapters))
