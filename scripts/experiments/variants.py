"""Variants of one recipe that are compared: what each computes, and its run in a process of its own."""

import copy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from data import Task
from data.rows import row_lengths
from eval.console import bar_columns, make_console
from eval.files import ROOT
from skipdecode import CostModel
from skipdecode.families import text_config
from train.build import build_task
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
        """What all are trained on."""
        return build_task(self.recipe())

    @cached_property
    def prepared(self) -> Prepared:
        """The recipe's own model, tokenizer, rows and schedules."""
        return prepare(self.recipe(), self.task, make_arguments(self.recipe(), Path("unused")))

    def cost(self, overrides: Sequence[str] = ()) -> CostModel:
        """What a decode step of a variant costs: that of the recipe's model, or of a shallow one made of it."""
        recipe, config = self.recipe(overrides), copy.deepcopy(self.prepared.model.config)
        if recipe.model.layers not in (None, text_config(config).num_hidden_layers):
            shrink_config(config, recipe.model.layers)
        return CostModel.of(config, self.prepared.model.dtype)

    def sampler(self, overrides: Sequence[str] = ()) -> ScheduleSampler:
        """The schedules that a variant trains under. Raises ConfigError where they can't be."""
        return recipe_sampler(self.recipe(overrides), self.task, self.cost(overrides))[0]

    def mean_layers(self, speedup: float) -> int:
        """The recipe's mean budget at a target, over the horizon and rounded: the layers of a model as fast."""
        schedule = self.prepared.skip_config.schedule_for(self.cost(), speedup)
        return round(schedule.mean_budget(schedule.horizon))

    def work(self, overrides: Sequence[str] = ()) -> float:
        """What a row takes in a step on average, in passes of a column through one layer, forward and backward.

        The LM head isn't counted.
        """
        sampler = self.sampler(overrides)
        prompt, completion = (float(lengths.mean()) for lengths in row_lengths(self.prepared.encoded.rows))
        distils = bool(self.recipe(overrides).optim.distillation)
        passes = mean_work(sampler, SAMPLED_STEPS, distils, prompt, completion)
        return passes * sampler.schedules[0].num_layers

    def train(self, overrides: Sequence[str], folder: Path, log: Path) -> None:
        """Train a variant into a folder, or what is left of its run; nothing where it is finished.

        Raises subprocess.CalledProcessError where that fails; the log says why.
        """
        if (folder / "config.json").exists():
            return
        where = f"output.dir={folder.resolve()}"  # the command runs in the checkout
        run_logged(["train.py", "--recipe", self.name, *self.common, *overrides, where], log)


def run_logged(command: Sequence[str], log: Path) -> None:
    """Run a command of Python in the checkout and append what it prints to a file."""
    with log.open("a", encoding="utf-8") as stream:
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=stream, stderr=stream)


def run_jobs(jobs: Mapping[str, Callable[[], None]], at_a_time: int) -> list[str]:
    """Run jobs under a progress bar; where the process of one fails, say so at once and go on with the others.

    Returns:
        The names of those that failed.
    """
    failed: list[str] = []
    columns = (*bar_columns(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn())
    with Progress(*columns, console=make_console(stderr=True)) as progress, ThreadPoolExecutor(at_a_time) as pool:
        bar = progress.add_task("variants", total=len(jobs))
        names = {pool.submit(job): name for name, job in jobs.items()}
        for future in as_completed(names):
            try:
                future.result()
            except subprocess.CalledProcessError as error:
                failed.append(names[future])
                progress.console.print(f"{names[future]} failed with status {error.returncode}: its log says why")
            progress.advance(bar)
    return failed
