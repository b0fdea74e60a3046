"""A setting that has no effect because of another one is refused, in a one-line error that names both."""

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from skipdecode import ConfigError, SkipSchedule
from train.build import build_task
from train.effects import RULES
from train.prepare import make_arguments, prepare
from train.recipe import Recipe, load_recipe, recipe_names

BASE = {"model.shape": "opt-tiny", "data.task": "departures", "schedule.speedups": [1, 2, 3]}
PRETRAINED = {"model.shape": None, "model.name_or_path": "gpt2"}
FILES = {"schedule.speedups": None, "schedule.files": ["a.json", "b.json"]}
EXITS = {"optim.exits": "all", "schedule.speedups": [1]}
FAST = {"optim.distillation": 1.0, "schedule.speedups": [2, 3]}

# A key, a value that isn't its default, the other key that makes it ineffective, and the values that do so.
CASES: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("model.gguf_file", "model.gguf", "model.name_or_path", {}),
    ("model.quantize", "nf4", "model.name_or_path", {"lora.r": 4}),
    ("model.quantize", "nf4", "lora.r", PRETRAINED),
    ("model.keep", "top", "model.layers", {}),
    ("model.order", [0, 1], "model.keep", {"model.layers": 2, "model.keep": "top"}),
    ("model.vocab_size", 300, "model.name_or_path", PRETRAINED),
    ("model.vocab_size", 300, "model.tokenizer", {"model.tokenizer": "gpt2"}),
    ("model.trust_remote_code", True, "model.name_or_path", {}),
    ("schedule.sampling", "sandwich", "schedule.speedups", {"schedule.speedups": [3]}),
    ("schedule.sampling", "sandwich", "schedule.files", {**FILES, "schedule.files": ["a.json"]}),
    ("schedule.weights", [2.0], "schedule.speedups", {"schedule.speedups": [3]}),
    ("schedule.weights", [2.0], "schedule.files", {**FILES, "schedule.files": ["a.json"]}),
    ("schedule.weights", [1.0, 2.0, 3.0], "schedule.sampling", {"schedule.sampling": "sandwich"}),
    ("schedule.weights", [1.0, 2.0, 3.0], "schedule.sampling", {"schedule.sampling": "all"}),
    *(
        ("schedule.weights", [1.0], "schedule.speedup_range", {"schedule.speedups": None, "schedule.speedup_range": r})
        for r in ([1, 4], [2.5, 3.0])
    ),
    ("schedule.decay", "cosine", "schedule.files", FILES),
    ("schedule.decay_rate", 3.0, "schedule.files", FILES),
    ("schedule.order", [0, 1], "schedule.files", FILES),
    ("schedule.profile", "auto", "schedule.files", FILES),
    ("schedule.placement", "bottom", "schedule.files", FILES),
    ("schedule.prompt", "max", "schedule.files", FILES),
    ("schedule.prompt", 4, "schedule.files", FILES),
    ("schedule.prompt_stop", 4, "schedule.files", FILES),
    ("schedule.warmup_layers", 2, "schedule.files", FILES),
    ("schedule.decay", "power", "optim.exits", EXITS),
    ("schedule.decay_rate", 3.0, "optim.exits", EXITS),
    ("schedule.placement", "even", "optim.exits", EXITS),
    ("schedule.placement", "ends", "optim.exits", EXITS),
    ("schedule.order", [0, 1], "optim.exits", EXITS),
    ("schedule.order", [0, 1], "schedule.placement", {}),
    ("schedule.spread", 0.3, "optim.exits", EXITS),
    *(("schedule.decay_rate", 3.0, "schedule.decay", {"schedule.decay": each}) for each in ("constant", "cosine")),
    ("schedule.spread", 0.3, "schedule.decay", {"schedule.decay": "constant"}),
    ("schedule.prompt_stop", 4, "schedule.speedups", {"schedule.speedups": [1]}),
    ("schedule.default_speedup", 2.0, "lora.merge", {**PRETRAINED, "lora.r": 4, "lora.merge": False}),
    ("optim.warmup_steps", 5, "optim.scheduler", {"optim.scheduler": "constant"}),
    ("optim.teacher", "gpt2", "optim.distillation", {}),
    ("optim.exit_every", 3, "optim.exits", EXITS),
    ("optim.depth_weight_power", 1.0, "optim.exits", {**EXITS, "optim.exits": "rotating"}),
    ("optim.teacher", "gpt2", "optim.exits", {**EXITS, "optim.distillation": 1.0}),
    ("optim.distillation", 0.5, "schedule.speedups", {"schedule.speedups": [1]}),
    ("optim.depth_weight_power", 1.0, "schedule.speedups", {"schedule.speedups": [1]}),
    ("optim.depth_weight_power", 1.0, "schedule.decay", {"schedule.decay": "constant", "schedule.prompt": "max"}),
    ("optim.depth_weight_power", 1.0, "optim.distillation", FAST),
    ("optim.label_smoothing", 0.1, "optim.distillation", FAST),
    ("train.epochs", 3.0, "train.max_steps", {"train.max_steps": 50}),
    ("train.finish_with", "best", "train.validate_rows", {}),
    (
        *("train.finish_with", "best", "train.save_steps"),
        {"train.validate_rows": 8, "train.max_steps": 50, "train.save_steps": 50},
    ),
    ("lora.alpha", 8, "lora.r", {}),
    ("lora.dropout", 0.1, "lora.r", {}),
    ("lora.target_modules", ["q_proj"], "lora.r", {}),
    ("lora.merge", False, "lora.r", {}),
    ("evaluation.limit", 10, "evaluation.speedups", {}),
    ("evaluation.batch_size", 16, "evaluation.speedups", {}),
    ("evaluation.tokenizer", "intl", "evaluation.speedups", {}),
    ("tracking.project", "mine", "tracking.wandb", {"tracking.wandb": "off"}),
    ("tracking.name", "mine", "tracking.wandb", {"tracking.wandb": "off"}),
    ("publish.public", True, "publish.repository", {}),
    ("publish.tag", "v1", "publish.repository", {}),
]
# Keys that always have an effect, or that are always needed. Every recipe key must be here or in CASES.
ALWAYS = {
    "model": {"name_or_path", "shape", "config", "layers", "tokenizer", "dtype"},
    "data": {
        "task",
        "path",
        "options",
        "max_prompt_tokens",
        "max_completion_tokens",
        "limit",
        "completions",
        "num_proc",
        "cache_dir",
    },
    "schedule": {"speedups", "files", "speedup_range", "horizon", "over", "batch_size", "prompt_length", "texts"},
    "optim": {
        *("learning_rate", "weight_decay", "beta1", "beta2", "scheduler", "max_grad_norm"),
        *("exits", "layer_dropout"),
    },
    "train": {
        *("max_steps", "per_device_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "precision"),
        *("logging_steps", "save_steps", "save_total_limit", "validate_rows", "seed"),
    },
    "lora": {"r"},
    "deepspeed": {"config"},
    "evaluation": {"speedups", "max_new_tokens"},
    "tracking": {"wandb"},
    "output": {"dir"},
    "publish": {"repository"},
}
EVERY = pytest.mark.parametrize(("key", "value", "other", "values"), CASES)


def load(folder: Path, in_file: dict[str, Any], overridden: dict[str, Any] | None = None) -> Recipe:
    """Load a recipe with some values in its file and some in overrides."""
    recipe = OmegaConf.create()
    for key, value in (BASE | in_file).items():
        OmegaConf.update(recipe, key, value)
    (folder / "mine.yaml").write_text(OmegaConf.to_yaml(recipe), encoding="utf-8")
    return load_recipe(str(folder / "mine.yaml"), [f"{key}={json.dumps(v)}" for key, v in (overridden or {}).items()])


def get(recipe: Recipe, key: str) -> Any:
    return attrgetter(key)(recipe)


def default_of(key: str) -> Any:
    section, name = key.split(".")
    kind: Any = Recipe.model_fields[section].annotation
    return kind.model_fields[name].default


@EVERY
def test_a_setting_without_effect_is_refused_in_the_file_and_in_overrides(
    key: str, value: Any, other: str, values: dict[str, Any], tmp_path: Path
) -> None:
    both = {**values, key: value}
    for in_file, overridden in ((both, {}), ({}, both), (values, {key: value})):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, in_file, overridden)
        message = str(caught.value)
        assert message.startswith(f"{key} is {json.dumps(value)} and {other} is ")
        assert "\n" not in message


@EVERY
def test_the_default_of_a_setting_without_effect_is_accepted(
    key: str, value: Any, other: str, values: dict[str, Any], tmp_path: Path
) -> None:
    load(tmp_path, {**values, key: default_of(key)})
    load(tmp_path, values, {key: default_of(key)})


@EVERY
def test_an_override_resets_settings_of_the_file_that_it_leaves_without_effect(
    key: str, value: Any, other: str, values: dict[str, Any], tmp_path: Path
) -> None:
    """For example `train.max_steps=100` resets `train.epochs`; and the resolved recipe reloads unchanged."""
    if other not in values:
        values = {**values, other: default_of(other)}
    recipe = load(tmp_path, {key: value, **{k: v for k, v in values.items() if k != other}}, {other: values[other]})
    assert get(recipe, key) == default_of(key)
    (tmp_path / "again.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    again = load_recipe(str(tmp_path / "again.yaml"))
    assert again == recipe


@EVERY
def test_the_saved_recipe_of_a_run_may_have_settings_without_effect(
    key: str, value: Any, other: str, values: dict[str, Any], tmp_path: Path
) -> None:
    """Such a run of an earlier version must still be published."""
    with pytest.raises(ConfigError, match=other):
        load(tmp_path, {**values, key: value})
    assert get(load_recipe(str(tmp_path / "mine.yaml"), of_a_run=True), key) == default_of(key)


def test_every_recipe_key_and_every_rule_is_covered_by_a_case(tmp_path: Path) -> None:
    sections = load(tmp_path, {}).model_dump()
    keys = {f"{section}.{key}" for section, values in sections.items() for key in values}
    always = {f"{section}.{name}" for section, names in ALWAYS.items() for name in names}
    assert {key for key, *_ in CASES} | always == keys
    assert not {key for key, *_ in CASES} & always
    assert {(rule.key, rule.other) for rule in RULES} == {(key, other) for key, _, other, _ in CASES}


@settings(max_examples=30)
@given(name=st.sampled_from(recipe_names()), data=st.data())
def test_shipped_recipes_accept_common_overrides_without_further_changes(name: str, data: st.DataObject) -> None:
    """An override may leave settings of the file without effect, which are then reset."""
    common = ["train.max_steps=50", "tracking.wandb=off", "lora.r=null", "evaluation.speedups=null"]
    common += ["optim.scheduler=constant", "schedule.decay=constant", "schedule.decay=linear"]
    load_recipe(name, data.draw(st.lists(st.sampled_from(common), max_size=3)))
    load_recipe(name, ["schedule.speedups=[1]", "schedule.speedup_range=null", "optim.exits=all"])
    load_recipe(name, ["schedule.speedups=null", "schedule.speedup_range=null", "schedule.files=[a.json]"])
    load_recipe(name, ["model.shape=null", "model.config=null", "model.tokenizer=null", "model.name_or_path=gpt2"])


def test_settings_with_an_effect_are_accepted(tmp_path: Path) -> None:
    for values in (
        {**EXITS, "optim.distillation": 1.0, "optim.depth_weight_power": 1.0, "optim.label_smoothing": 0.1},
        {**EXITS, "schedule.placement": "bottom", "schedule.decay": "constant", "schedule.spread": 0},
        {"schedule.decay": "constant", "schedule.spread": 0, "optim.depth_weight_power": 1.0},
        {"optim.distillation": 1.0, "optim.label_smoothing": 0.1},
        {"optim.distillation": 1.0, "optim.teacher": "gpt2", "schedule.speedups": [1]},
        {"schedule.sampling": "sandwich", "schedule.speedups": [1, 2, 3, 4], "schedule.weights": [1, 2, 3, 4]},
        {"model.shape": "opt-tiny", "model.tokenizer": "gpt2", "model.trust_remote_code": True},
        {"evaluation.max_new_tokens": 9},
    ):
        recipe = load(tmp_path, values)
        assert all(get(recipe, key) == value for key, value in values.items())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optim.distillation": 0.5, **FILES}, "no schedule in schedule.files .* skips a layer"),
        ({"schedule.prompt": "max", "schedule.prompt_stop": 12}, "prompts run at most [0-9]+ layers, so they never"),
    ],
)
def test_settings_without_effect_under_the_given_schedules_are_refused_before_training(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    full = tmp_path / "full.json"
    full.write_text(SkipSchedule.full_depth(12).to_json())
    if "schedule.files" in values:
        values = {**values, "schedule.files": [str(full)]}
    recipe = load(tmp_path, {**values, "data.options": {"train_size": 8, "validation_size": 2, "test_size": 2}})
    key = next(iter(values))
    with pytest.raises(ConfigError, match=message) as caught:
        prepare(recipe, build_task(recipe), make_arguments(recipe, tmp_path))
    assert key in str(caught.value)
    assert "schedule." in str(caught.value)
