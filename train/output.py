"""The output folder of a run, which is new or holds an interrupted run to continue."""

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
# Settings that may change when a run continues, because the weights don't depend on them. Until the run is finished,
# the division of a step's rows may change too, as long as their number stays.
_MAY_CHANGE = {"evaluation", "tracking", "publish", "output", "data.num_proc", "data.cache_dir"}
_MAY_CHANGE |= {"train.logging_steps", "train.save_total_limit"}
_DIVISION = {"train.per_device_batch_size", "train.gradient_accumulation_steps"}


def is_finished(folder: Path) -> bool:
    """Whether a folder holds the finished checkpoint of a run."""
    return (folder / "config.json").exists() or (folder / "adapter_config.json").exists()


def check_folder(folder: Path, recipe: Recipe, console: Console | None = None) -> None:
    """Raise ConfigError unless a folder is new, empty, or holds an interrupted run of the same recipe.

    A run may be interrupted in training or in a stage after it. Settings on which the weights don't depend may have
    changed since; the console says which.
    """
    advice = "choose another with output.dir=FOLDER, or delete it"
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output.dir {folder} is a file: {advice}")
    names = {file.name for file in folder.iterdir()} if folder.exists() else set()
    if all(name == LOCK or fnmatch(name, f"{RECIPE_FILE}.*partial") for name in names):  # killed at its start
        return
    if is_finished(folder) and not stages_left(folder, recipe):
        raise ConfigError(f"output.dir {folder} already holds a finished run: {advice}")
    if RECIPE_FILE not in names:
        raise ConfigError(f"output.dir {folder} isn't empty and holds no run: {advice}")
    before, now = read_yaml(folder / RECIPE_FILE), recipe.model_dump()
    free = _MAY_CHANGE if is_finished(folder) else _MAY_CHANGE | _DIVISION
    if not recipe.train.validate_rows:  # validation draws random numbers, so its steps matter
        free = free | {"train.save_steps"}
    changed = difference(before, now, apart_from=free)
    if changed:
        state = "a finished" if is_finished(folder) else "an unfinished"
        raise ConfigError(f"output.dir {folder} holds {state} run of another recipe ({changed}): {advice}")
    if console is not None and (changed := difference(before, now)):
        console.print(f"continuing with changed settings: {changed}")


def check_schedules(checkpoint: str, now: SkipConfig) -> None:
    """Raise ConfigError where a checkpoint was trained under other schedules than this run's."""
    before = SkipConfig.load(checkpoint)
    if before is None:
        return
    old, new = (each.to_dict()["schedules"] for each in (before, now))
    changed = difference({"targets": ", ".join(old)}, {"targets": ", ".join(new)}) or difference(old, new)
    if changed:
        raise ConfigError(
            f"{checkpoint} was trained under other schedules ({changed}): restore the original data and "
            "schedule.files, or start a new run with output.dir=FOLDER"
        )
