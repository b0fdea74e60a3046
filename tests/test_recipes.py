"""Every recipe is a run that could start: its schedules, its DeepSpeed config, its line in the table."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data import Task
from skipdecode import ConfigError, CostModel
from train.build import build_task, model_config
from train.recipe import RECIPES, Recipe, load_recipe, recipe_names
from train.run import recipe_sampler

ROOT = Path(__file__).resolve().parent.parent
TABLE = (RECIPES / "README.md").read_text(encoding="utf-8")


def task_of(recipe: Recipe) -> Task:
    try:
        return build_task(recipe)
    except ConfigError as error:
        pytest.skip(str(error))


def test_there_is_a_recipe_of_each_size_and_kind_for_each_task() -> None:
    named = {f"{t}-opt-{s}{k}" for t in ("e2e", "tldr", "cnndm") for s in ("1.3b", "6.7b") for k in ("", "-lora")}
    assert named | {"e2e-opt-125m-scratch", "e2e-tiny", "quickstart"} == set(recipe_names())


@pytest.mark.parametrize("name", recipe_names())
def test_every_target_is_within_reach_of_the_recipes_shape(name: str) -> None:
    recipe = load_recipe(name)
    cost = CostModel.of(model_config(recipe), getattr(torch, recipe.model.dtype))
    task = task_of(recipe)
    sampler, _ = recipe_sampler(recipe, task, cost)
    for speedup, schedule in zip(sampler.speedups, sampler.schedules, strict=True):
        section = recipe.schedule
        found = cost.speedup(schedule, prompt_length=section.prompt_length, batch_size=section.batch_size)
        assert speedup <= found < speedup * 1.35, "the nearest that layers allow"
        assert schedule.horizon == task.horizon
    evaluated = recipe.evaluation.speedups
    assert evaluated is None or set(evaluated) <= set(sampler.speedups)


@pytest.mark.parametrize("name", recipe_names())
def test_settings_of_a_recipe_agree_with_each_other(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.deepspeed.config in (None, "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload")
    assert (recipe.lora.r is not None) == name.endswith("-lora")
    task = task_of(recipe)
    longest = (recipe.data.max_prompt_tokens or task.max_prompt_tokens) + task.max_new_tokens
    assert longest <= model_config(recipe).max_position_embeddings


def test_the_shapes_of_opt_are_those_of_the_published_models() -> None:
    """Parameters with tied embeddings, of a vocabulary of 50,272: 125 M, 1.3 B and 6.7 B."""
    for size, expected in (("125m", 125_239_296), ("1.3b", 1_315_758_080), ("6.7b", 6_658_473_984)):
        recipe = load_recipe("e2e-opt-1.3b", [f"model.name_or_path=facebook/opt-{size}"])
        cost = CostModel.of(model_config(recipe))
        config = model_config(recipe)
        positions = (config.max_position_embeddings + 2) * config.hidden_size
        layers = cost.num_layers * cost.layer_parameters
        assert layers + cost.head_parameters + cost.other_parameters + positions == expected


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_in_the_table(name: str) -> None:
    recipe = load_recipe(name)
    (line,) = re.findall(rf"^\| \[`{re.escape(name)}`\]\({re.escape(name)}\.yaml\).*$", TABLE, re.MULTILINE)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2] == recipe.data.task
    assert cells[4] == (recipe.deepspeed.config or "none")
    first, *_, last = (float(cell) for cell in cells[5:])
    assert len(cells) == 9
    assert last < first or recipe.deepspeed.config is None


def test_the_table_is_what_the_command_beside_it_prints() -> None:
    command = [sys.executable, "scripts/recipe_memory.py", "--recipe", "quickstart", "e2e-opt-125m-scratch"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for line in printed.splitlines():
        assert line in TABLE.splitlines()
