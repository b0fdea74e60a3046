"""Runs of the quickstart recipe that take seconds."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import train.run
from train.recipe import Recipe, load_recipe
from train.run import run

SMALL = [
    "model.config.num_hidden_layers=8",
    "model.config.hidden_size=48",
    "model.config.word_embed_proj_dim=48",
    "model.config.ffn_dim=192",
    "model.vocab_size=320",
    "data.options={train_size: 60, validation_size: 4, test_size: 12}",
    "train.per_device_batch_size=8",
    "train.logging_steps=1",
    "train.save_steps=3",
    "optim.warmup_steps=0",
    "tracking.wandb=off",
]


def small_recipe(*overrides: str) -> Recipe:
    """The quickstart recipe made small; without the sizes of its shape where a trained model takes its place."""
    trained = any(override.startswith("model.name_or_path=") for override in overrides)
    small = [override for override in SMALL if not (trained and override.startswith("model."))]
    return load_recipe("quickstart", [*small, *overrides])


def train_small(folder: Path, *overrides: str, drawn: bool = False) -> Path:
    """A run of the quickstart recipe; unless `drawn`, a pixel is its picture, which takes half of the time."""
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            patch.setattr(train.run, "draw_schedules", lambda path, schedules: Image.new("P", (1, 1)).save(path))
        return run(small_recipe(f"output.dir={folder}", *overrides), "quickstart")


def train_small_on(data: str, folder: Path, *overrides: str) -> Path:
    """The same model on another task, whose section of the recipe is `data`, as YAML."""
    recipe = folder.parent / f"{folder.name}.yaml"
    recipe.write_text(
        f"model: {{shape: opt-tiny}}\ndata: {data}\nschedule: {{speedups: [1, 2, 3]}}\n", encoding="utf-8"
    )
    shared = [override for override in SMALL if not override.startswith("data.")]
    return run(load_recipe(str(recipe), [*shared, f"output.dir={folder}", *overrides]), folder.name)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
