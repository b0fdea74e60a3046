"""The folder that a run goes into: a new one, or that of a run which it continues."""

from fnmatch import fnmatch
from pathlib import Path

from rich.console import Console

from configs.files import read_yaml
from eval.difference import difference
from eval.output import LOCK
from skipdecode import ConfigError
from skipdecode.checkpoint.skip_config import SkipConfig
from train.recipe import Recipe
from train.stages import stages_left

RECIPE_FILE = "recipe.yaml"
# What may change: what the weights don't depend on, and until a run is finished how a step's rows are divided, while
# they are as many.
_MAY_CHANGE = {"evaluation", "tracking", "publish", "output", "data.num_proc", "data.cache_dir"}
_MAY_CHANGE |= {"train.logging_steps", "train.save_total_limit"}
_DIVISION = {"train.per_device_batch_size", "train.gradient_accumulation_steps"}


def is_finished(folder: Path) -> bool:
    """Say whether a folder holds the checkpoint that a run ends with."""
    return (folder / "config.json").exists() or (folder / "adapter_config.json").exists()


def check_folder(folder: Path, recipe: Recipe, console: Console | None = None) -> None:
    """A folder may be new, empty, or hold a run of the same recipe that was cut off, also after its training (a trained
    run with stages left); anything else is refused.

    What the weights don't depend on may have changed in the recipe, of which the console is told.
    """
    advice = "choose another with output.dir=FOLDER, or remove it"
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output.dir {folder} is a file: {advice}")
    names = {file.name for file in folder.iterdir()} if folder.exists() else set()
    if all(name == LOCK or fnmatch(name, f"{RECIPE_FILE}.*partial") for name in names):  # killed as it began
        return
    if is_finished(folder) and not stages_left(folder, recipe):
        raise ConfigError(f"output.dir {folder} already holds a finished run: {advice}")
    if RECIPE_FILE not in names:
        raise ConfigError(f"output.dir {folder} holds files that are no run's: {advice}")
    before, now = read_yaml(folder / RECIPE_FILE), recipe.model_dump()
    free = _MAY_CHANGE if is_finished(folder) else _MAY_CHANGE | _DIVISION
    if not recipe.train.validate_rows:  # a validation draws random numbers, so when it is counts
        free = free | {"train.save_steps"}
    changed = difference(before, now, apart_from=free)
    if changed:
        state = "a finished" if is_finished(folder) else "an unfinished"
        raise ConfigError(f"output.dir {folder} holds {state} run of another recipe ({changed}): {advice}")
    if console is not None and (changed := difference(before, now)):
        console.print(f"going on with other settings: {changed}")


def check_schedules(checkpoint: str, now: SkipConfig) -> None:
    """Raise ConfigError where a checkpoint was trained under other schedules than those that would follow it."""
    before = SkipConfig.load(checkpoint)
    if before is None:
        return
    old, new = (each.to_dict()["schedules"] for each in (before, now))
    changed = difference({"targets": ", ".join(old)}, {"targets": ", ".join(new)}) or difference(old, new)
    if changed:
        raise ConfigError(
            f"{checkpoint} was trained under other schedules ({changed}): bring back the data and schedule.files that "
            "they came from, or start anew with output.dir=FOLDER"
        )
