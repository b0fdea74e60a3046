"""Recipes resolve, and the error for a mistake in one says what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

from skipdecode import ConfigError
from train.recipe import RECIPES, load_recipe, recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_reloads_unchanged_from_its_resolved_form(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert recipe.output.dir == f"outputs/{name}"
    (tmp_path / "again.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(str(tmp_path / "again.yaml")) == recipe


def test_a_tilde_in_a_path_expands_to_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell doesn't expand it after a key, and a folder with that name would be dangerous to delete."""
    monkeypatch.setenv("HOME", "/home/me")
    recipe = load_recipe("quickstart", ["output.dir=~/run", "data.cache_dir=~/rows", "model.name_or_path=~/opt"])
    assert (recipe.output.dir, recipe.data.cache_dir) == ("/home/me/run", "/home/me/rows")
    assert recipe.model.name_or_path == "/home/me/opt"


def test_overrides_use_dotted_keys_and_yaml_types() -> None:
    overrides = ["data.path=/some/where", "optim.learning_rate=1e-4", "train.max_steps=7", "tracking.wandb=off"]
    recipe = load_recipe("e2e-tiny", [*overrides, "schedule.speedups=[1,2.5]", "model.config.dropout=0.2"])
    assert recipe.data.path == "/some/where"
    assert recipe.optim.learning_rate == 1e-4
    assert recipe.train.max_steps == 7
    assert recipe.schedule.speedups == [1, 2.5]
    assert recipe.tracking.wandb == "off"
    assert recipe.model.config == {"dropout": 0.2}
    assert recipe.model.shape == "opt-tiny"


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("e2e-tny", [], "unknown recipe 'e2e-tny': did you mean 'e2e-tiny'"),
        ("nowhere/r.yaml", [], "no such file"),
        ("e2e-tiny", ["optim.learning_rte=1"], "optim.learning_rte.*did you mean 'optim.learning_rate'"),
        ("e2e-tiny", ["optimiser.lr=1"], "unknown key.*optimiser"),
        ("e2e-tiny", ["train.max_steps=many"], "train.max_steps is 'many'"),
        ("e2e-tiny", ["train.max_steps=0"], "train.max_steps is 0: .*greater than or equal to 1"),
        ("e2e-tiny", ["schedule.decay=linaer"], "schedule.decay is 'linaer': Input should be 'linear'"),
        ("e2e-tiny", ["tracking.wandb=perhaps"], "tracking.wandb is 'perhaps'"),
        ("quickstart", ["schedule.speedups[0]=3"], r"overrides .*speedups\[0\]=3"),
        ("e2e-tiny", ["max_steps=3"], "expected section.key=value"),
        ("e2e-tiny", ["schedule.speedups=[1,"], "overrides"),
        ("e2e-tiny", ["schedule.weights=[.nan,1]"], "schedule.weights.0 is nan: it must be a number between"),
        ("e2e-tiny", ["model.config.dropout=.nan"], "model.config.dropout is nan"),
        ("e2e-tiny", ["train.seed=99999999999999999999"], "train.seed is 99999999999999999999"),
        ("e2e-tiny", ["train.max_steps=" + "9" * 5_000], "overrides"),
        ("e2e-tiny", ["schedule.horizon=1000000000"], "schedule.horizon is 1000000000"),
        ("e2e-tiny", ["train.max_steps="], "'train.max_steps=' has no value: train.max_steps=null unsets it"),
        ("e2e-tiny", ["data.options=" + "[" * 5_000], "overrides"),
        ("e2e-tiny", ["output.dir=\udcff"], "surrogates not allowed"),
        ("a" * 300, [], "no such file"),
    ],
)
def test_a_mistake_in_a_recipe_gives_a_one_line_error_that_names_it(
    name: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(name, overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "must hold a mapping"),
        ("model: [", "can't be read"),
        ("model:\n  shape: opt-tiny\ndata:\n  task: e2e\n", "schedule is missing"),
        ("model: " + "[" * 5_000, "can't be read"),
        ("model: " + "9" * 5_000, "can't be read"),
        ("model: \udcff", "can't be read"),
        ("model: {}\nmodel: {}", "can't be read"),
    ],
)
def test_an_invalid_recipe_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.yaml").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match=message):
        load_recipe(str(tmp_path / "bad.yaml"))


def test_a_mistyped_key_is_reported_without_heavy_imports() -> None:
    mistyped = ["--recipe", "quickstart", "train.max_stepz=1"]
    code = f"import sys, train.cli; train.cli.main({mistyped}); print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=RECIPES.parent)
    assert "did you mean 'train.max_steps'" in said.stderr
    assert said.stdout == "False\n"
