"""Variants of a recipe."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data import Task
from skipdecode import CostModel, SkipSchedule
from skipdecode.errors import ConfigError
from skipdecode.families import text_config
from skipdecode.training.sampling import ScheduleSampler
from train.build import build_task, model_config
from train.prepare import Prepared, make_arguments, prepare, recipe_sampler
from train.recipe import Recipe, load_recipe
from train.shallow import shrink_config


@dataclass(frozen=True)
class Variants:
    """A recipe whose variants are compared.

    Attributes:
        name: name of the recipe, or its YAML file.
        common: overrides of every variant, such as the data.
    """

    name: str
    common: tuple[str, ...] = ()

    def recipe(self, overrides: Sequence[str] = ()) -> Recipe:
        """The recipe of a variant. Raises ConfigError as `load_recipe` does."""
        return load_recipe(self.name, [*self.common, *overrides])

    @cached_property
    def task(self) -> Task:
        """The task of all variants."""
        return build_task(self.recipe())

    @cached_property
    def prepared(self) -> Prepared:
        """The model, tokenizer, rows and schedules of the recipe itself."""
        return prepare(self.recipe(), self.task, make_arguments(self.recipe(), Path("unused")))

    def cost(self, overrides: Sequence[str] = ()) -> CostModel:
        """The cost model of a variant.

        A checkpoint that the variant starts from may not exist yet, so the recipe's config is used with the variant's
        number of layers.
        """
        recipe, config = self.recipe(overrides), copy.deepcopy(self.prepared.model.config)
        if recipe.model.shape is not None:
            vocabulary = text_config(config).vocab_size  # that of the trained tokenizer
            config = model_config(recipe)
            text_config(config).vocab_size = vocabulary
        elif recipe.model.layers not in (None, text_config(config).num_hidden_layers):
            shrink_config(config, recipe.model.layers, recipe.model.keep)
        return CostModel.of(config, self.prepared.model.dtype)

    def sampler(self, overrides: Sequence[str] = ()) -> ScheduleSampler:
        """The schedules that a variant trains under. Raises ConfigError for impossible ones."""
        rows = self.prepared.encoded.rows
        return recipe_sampler(self.recipe(overrides), self.task, self.cost(overrides), rows)[0]

    def layers_as_fast(self, speedup: float) -> int:
        """The number of layers with which a shallow model's predicted speedup is nearest to a target.

        The speedup is over the recipe's model, for the same lengths, batch size and kind of speedup as its targets.
        Raises ConfigError for a target that a single layer doesn't reach.
        """
        config = self.prepared.skip_config
        cost = config.cost_for(self.cost())

        def speed(layers: int) -> float:
            alone = SkipSchedule(cost.num_layers, layers, layers, decay="constant", prompt="max")
            return cost.speedup(alone, over=config.over)

        if speedup > speed(1):
            raise ConfigError(f"speedup is {speedup:g}: a single layer reaches at most {speed(1):.2f}x")
        return min(range(1, cost.num_layers + 1), key=lambda layers: abs(math.log(speed(layers) / speedup)))
