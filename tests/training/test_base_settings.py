"""A base model's generation settings are refused before the first step, or its finished checkpoint decodes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_checkpoints import save_checkpoint
from small_runs import SMALL, train_small
from transformers import AutoModelForCausalLM, GenerationConfig

import skipdecode.cli.options
import train.cli
from skipdecode import ConfigError, SkipSchedule, skip_generate
from skipdecode.checkpoint.loading import load
from skipdecode.engine.engine import Engine
from train.base_settings import GENERATION_FILE, MODEL_FILE, settle_generation
from train.build import build_model, build_task
from train.recipe import Recipe, load_recipe

LAYERS = 6
STARTS = ("model.shape=null", "model.config=null")
# Values that transformers accepts; other settings are drawn only from ANY.
VALID: dict[str, Any] = {
    "stop_strings": ["\n"],
    "cache_implementation": st.sampled_from(["static", "offloaded", "quantized", "hybrid", "dynamic", "paged"]),
    "cache_config": {"backend": "quanto"},
    "num_return_sequences": st.integers(1, 3),
    "suppress_tokens": [5],
    "bad_words_ids": [[5, 6]],
    "sequence_bias": [[[5], -2.0]],
    "force_words_ids": [[5]],
    "exponential_decay_length_penalty": [2, 1.5],
    "watermarking_config": {"bias": 2.0},
    "early_stopping": st.sampled_from([True, "never"]),
    "dola_layers": st.sampled_from(["high", [0, 1]]),
    "compile_config": {},
    "temperature": st.sampled_from([0.5, 1e-45]),
    "top_p": 0.9,
    "min_p": 0.1,
}
ANY = st.sampled_from([None, True, False, -1, 0, 1, 2, 1000, -0.5, 0.0, 0.5, 1.0, 1.5, "", "x", [], [1], [[1]], {}])
KNOWN = sorted(key for key in vars(GenerationConfig()) if key != "transformers_version" and not key.startswith("_"))
TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id"}  # in config.json these belong to the model


def values_of(key: str) -> st.SearchStrategy[Any]:
    valid = VALID.get(key, ANY)
    return ANY | (valid if isinstance(valid, st.SearchStrategy) else st.just(valid))


@st.composite
def base_settings(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A file, and values of some of the settings that transformers knows for it."""
    file = draw(st.sampled_from([GENERATION_FILE, MODEL_FILE]))
    known = KNOWN if file == GENERATION_FILE else [*sorted(set(KNOWN) - TOKENS), "return_dict"]
    keys = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
    found = {key: draw(values_of(key)) for key in keys}
    return file, {**({"do_sample": True} if draw(st.booleans()) else {}), **found}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("base") / "base", LAYERS, max_position_embeddings=256)


def with_settings(base: Path, folder: Path, file: str, values: dict[str, Any]) -> Path:
    """A copy of a base model with these settings in one file; any other `generation_config.json` is removed."""
    shutil.copytree(base, folder, dirs_exist_ok=True)
    (folder / GENERATION_FILE).unlink()
    before = json.loads((folder / MODEL_FILE).read_text()) if file == MODEL_FILE else {"eos_token_id": 2}
    (folder / file).write_text(json.dumps({**before, **values}))
    return folder


def recipe_of(base: Path, *changes: str) -> Recipe:
    return load_recipe("quickstart", [*STARTS, f"model.name_or_path={base}", *changes])


def check_decodes(folder: Path, max_new_tokens: int = 4) -> None:
    """Check that a finished checkpoint decodes in every way with its own settings."""
    schedule = SkipSchedule(LAYERS, 2, 1, horizon=4)
    model, tokenizer = load(str(folder))
    inputs = tokenizer(["a ferry", "to"], return_tensors="pt", padding=True)
    length = inputs["input_ids"].shape[1]
    for request in ({}, {"do_sample": False}):
        plain = AutoModelForCausalLM.from_pretrained(folder).generate(**inputs, **request)
        skipped = model.generate(**inputs, **request, custom_generate=skip_generate, schedule=schedule)
        for ids in (plain, skipped):
            assert isinstance(ids, torch.Tensor)
            assert length < ids.shape[1] <= length + max_new_tokens
    engine = Engine(model, tokenizer, most_rows=1, weights="model")
    answer = engine.submit(inputs["input_ids"][0].tolist(), schedule=schedule, do_sample=False)
    while engine.step():
        pass
    assert answer.result(timeout=60).tokens


@settings(max_examples=25)
@given(drawn=base_settings())
def test_any_base_settings_are_refused_by_file_and_key_or_the_checkpoint_decodes(
    base: Path, tmp_path_factory: pytest.TempPathFactory, drawn: tuple[str, dict[str, Any]]
) -> None:
    file, values = drawn
    folder = tmp_path_factory.mktemp("drawn")
    recipe = recipe_of(with_settings(base, folder / "base", file, values))
    refused = None
    try:
        model, tokenizer = build_model(recipe, [])
        settle_generation(recipe, model, tokenizer)
    except ConfigError as error:
        refused = str(error)
    shutil.rmtree(folder)
    if refused is not None:
        assert file in refused
        assert any(key in refused for key in values)
        assert "\n" not in refused
        return
    finished = tmp_path_factory.mktemp("finished")
    model.save_pretrained(finished)
    tokenizer.save_pretrained(finished)
    config = GenerationConfig.from_pretrained(finished)
    config.max_new_tokens = 4  # as the end of a run sets it
    config.save_pretrained(finished)
    check_decodes(finished)
    shutil.rmtree(finished)


HARMLESS = {
    "use_cache": False,
    "num_beams": 4,
    "length_penalty": 0.5,
    "stop_strings": ["\n"],
    "cache_implementation": "quantized",
    "token_healing": True,
    "output_attentions": True,
    "return_dict_in_generate": True,
}


def trained(base: Path, folder: Path, *changes: str) -> Path:
    start = [*STARTS, f"model.name_or_path={base}", "schedule.speedups=[1,2]", "schedule.texts=0", "train.max_steps=1"]
    return train_small(folder, *start, "evaluation.max_new_tokens=4", *changes)


def test_harmless_base_settings_are_omitted_with_one_warning_and_the_checkpoint_decodes(
    base: Path, tmp_path: Path, capsys: Any
) -> None:
    own = with_settings(base, tmp_path / "base", GENERATION_FILE, HARMLESS)
    config = json.loads((own / MODEL_FILE).read_text())
    (own / MODEL_FILE).write_text(json.dumps({**config, "return_dict": False}))
    folder = trained(own, tmp_path / "run", "evaluation.speedups=[1,2]", "evaluation.limit=2")
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "omits these settings" in line]
    for key in HARMLESS.keys() - {"length_penalty"}:  # without beams it has no effect
        assert f"{key} in generation_config.json of '{own}' is {HARMLESS[key]!r}" in warning
    assert f"return_dict in config.json of '{own}' is False" in warning
    kept = json.loads((folder / GENERATION_FILE).read_text())
    assert not kept.keys() & HARMLESS.keys()
    check_decodes(folder, kept["max_new_tokens"])
    capsys.readouterr()
    assert skipdecode.cli.options.main(["generate", str(folder), "to: Saltfern", "--max-new-tokens", "4"]) == 0
    assert json.loads((folder / "eval" / "report.json").read_text())["rows"]


def test_generation_settings_in_config_json_are_omitted_when_adapters_are_merged(
    base: Path, tmp_path: Path, capsys: Any
) -> None:
    own = with_settings(base, tmp_path / "base", MODEL_FILE, {"num_beams": 4, "use_cache": False})
    folder = trained(own, tmp_path / "run", "lora.r=2")
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "omits these settings" in line]
    assert "num_beams in config.json" in warning
    assert "use_cache in config.json" in warning
    check_decodes(folder)
    with pytest.raises(ConfigError, match=r"use_cache in config\.json of .* is False: with lora\.merge=false"):
        trained(own, tmp_path / "apart", "lora.r=2", "lora.merge=false")
    assert not (tmp_path / "apart").exists()


def test_generation_settings_in_a_recipe_are_omitted_too(tmp_path: Path) -> None:
    changes = ["use_cache=false", "return_dict=false", "output_hidden_states=true", f"num_hidden_layers={LAYERS}"]
    recipe = load_recipe("quickstart", [*SMALL, *(f"model.config.{change}" for change in changes)])
    model, tokenizer = build_model(recipe, build_task(recipe).load("train"))
    omitted = settle_generation(recipe, model, tokenizer)
    assert {"model.config.use_cache is False", "model.config.return_dict is False"} <= set(omitted)
    model.generation_config.max_new_tokens = 4
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    check_decodes(tmp_path)


@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "run"])
@pytest.mark.parametrize(
    ("file", "values", "key"),
    [
        (GENERATION_FILE, {"penalty_alpha": 0.6}, "penalty_alpha"),
        (GENERATION_FILE, {"do_sample": True, "top_k": 4, "dola_layers": "high"}, "dola_layers"),
        (MODEL_FILE, {"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_of_other_decoding_methods_are_refused_before_the_first_step(
    base: Path, tmp_path: Path, capsys: Any, file: str, values: dict[str, Any], key: str, *, dry: bool
) -> None:
    own = with_settings(base, tmp_path / "base", file, values)
    small = [word for word in SMALL if not word.startswith("model.")]
    words = [*small, *STARTS, f"model.name_or_path={own}", f"output.dir={tmp_path / 'run'}", *["--dry-run"] * dry]
    assert train.cli.main(["--recipe", "quickstart", *words]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: {key} in {file} of '{own}' is {values[key]!r}: ")
    assert not (tmp_path / "run").exists()


def test_a_damaged_generation_config_is_refused(base: Path, tmp_path: Path) -> None:
    own = with_settings(base, tmp_path / "base", GENERATION_FILE, {})
    (own / GENERATION_FILE).write_text('{"num_beams": ')
    with pytest.raises(ConfigError, match=r"generation_config\.json of .* is damaged"):
        build_model(recipe_of(own), [])


def test_a_model_with_return_dict_false_in_its_config_decodes(base: Path, tmp_path: Path, capsys: Any) -> None:
    own = with_settings(base, tmp_path / "base", MODEL_FILE, {"return_dict": False})
    assert skipdecode.cli.options.main(["generate", str(own), "to", "--speedup", "1", "--max-new-tokens", "4"]) == 0
    printed = capsys.readouterr().out
    assert skipdecode.cli.options.main(["generate", str(base), "to", "--speedup", "1", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out == printed
