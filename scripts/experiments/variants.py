"""Variants of one recipe that are compared, and the work of each."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data import Task
from data.rows import row_lengths
from skipdecode import CostModel, SkipSchedule
from skipdecode.errors import ConfigError
from skipdecode.families import text_config
from train.build import build_task, model_config
from train.dry_run.work import SAMPLED_STEPS, mean_work
from train.prepare import Prepared, make_arguments, prepare, recipe_sampler
from train.recipe import Recipe, load_recipe
from train.sampling import ScheduleSampler
from train.shallow import shrink_config


@dataclass(frozen=True)
class Variants:
    """A recipe of which variants are compared.

    Attributes:
        name: of the recipe, or its YAML file.
        common: overrides of every variant, such as the data.
    """

    name: str
    common: tuple[str, ...] = ()

    def recipe(self, overrides: Sequence[str] = ()) -> Recipe:
        """The recipe of a variant. Raises ConfigError as `load_recipe` does."""
        return load_recipe(self.name, [*self.common, *overrides])

    @cached_property
    def task(self) -> Task:
        """The task that all are trained on."""
        return build_task(self.recipe())

    @cached_property
    def prepared(self) -> Prepared:
        """The recipe's own model, tokenizer, rows and schedules."""
        return prepare(self.recipe(), self.task, make_arguments(self.recipe(), Path("unused")))

    def cost(self, overrides: Sequence[str] = ()) -> CostModel:
        """The cost of a decode step of a variant: of its shape, or of as many layers of the recipe's model.

        A checkpoint that a variant starts from needn't have been trained yet, so its own config isn't asked for.
        """
        recipe, config = self.recipe(overrides), copy.deepcopy(self.prepared.model.config)
        if recipe.model.shape is not None:
            vocabulary = text_config(config).vocab_size  # by the tokenizer that was trained
            config = model_config(recipe)
            text_config(config).vocab_size = vocabulary
        elif recipe.model.layers not in (None, text_config(config).num_hidden_layers):
            shrink_config(config, recipe.model.layers, recipe.model.keep)
        return CostModel.of(config, self.prepared.model.dtype)

    def sampler(self, overrides: Sequence[str] = ()) -> ScheduleSampler:
        """The schedules that a variant trains under. Raises ConfigError where they can't be."""
        rows = self.prepared.encoded.rows
        return recipe_sampler(self.recipe(overrides), self.task, self.cost(overrides), rows)[0]

    def layers_as_fast(self, speedup: float) -> int:
        """The layers of a shallow model whose speed over the recipe's model is nearest to a target, as the cost model
        predicts it: of the same texts, prompts and batches, and of what the recipe's targets are of.

        Raises ConfigError for a target that one layer alone doesn't reach.
        """
        config = self.prepared.skip_config
        cost = config.cost_for(self.cost())

        def speed(layers: int) -> float:
            alone = SkipSchedule(cost.num_layers, layers, layers, decay="constant", prompt="max")
            return cost.speedup(alone, over=config.over)

        if speedup > speed(1):
            raise ConfigError(f"speedup is {speedup:g}: one layer alone reaches at most {speed(1):.2f}x")
        return min(range(1, cost.num_layers + 1), key=lambda layers: abs(math.log(speed(layers) / speedup)))

    def layers(self, overrides: Sequence[str] = ()) -> int:
        """The layers of a variant's model."""
        return self.sampler(overrides).schedules[0].num_layers

    def work(self, overrides: Sequence[str] = ()) -> float:
        """The work of a row in a step on average, in passes of a column through one layer, forward and backward.

        The LM head isn't counted.
        """
        prompt, completion = (float(lengths.mean()) for lengths in row_lengths(self.prepared.encoded.rows))
        optim = self.recipe(overrides).optim
        lengths, frozen = (prompt, completion), optim.teacher is not None
        sampler = self.sampler(overrides)
        passes = mean_work(sampler, SAMPLED_STEPS, bool(optim.distillation), *lengths, frozen_teacher=frozen)
        return passes * self.layers(overrides)
