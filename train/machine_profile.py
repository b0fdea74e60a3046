"""The calibrated profile by which a run's targets are solved: saved with the run, found on this machine, or none."""

from pathlib import Path
from typing import Any

import torch

from skipdecode import ConfigError, CostModel
from skipdecode.generate.fast_path import fast_path
from skipdecode.schedule.machine_profile import Profile, find_profile, profile_setting
from train.distributed import on_first_process
from train.output import RECIPE_FILE
from train.recipe import Recipe

PROFILE_FILE = "profile.json"  # in the folder of a run whose targets were solved by a profile
AUTO = "auto"
_SHAPE = ("model_type", "num_layers", "layer_parameters", "head_parameters")  # must match the model's


def run_profile(recipe: Recipe, model: Any, sizes: CostModel, folder: Path, device: torch.device) -> Profile | None:
    """The calibrated profile of a run: saved in its folder, or else given by `schedule.profile`.

    Args:
        recipe: the recipe of the run.
        model: the model to train, before adapters are added.
        sizes: its cost model.
        folder: the folder of the run.
        device: the device of the training.

    Returns:
        None, which stands for the analytical cost model, where the recipe gives no profile, and with `auto` where this
        machine has none for such a model, or had none when the run began.

    Raises:
        ConfigError: for a file that can't be read, or whose profile is for a model of another shape.
    """
    named = recipe.schedule.profile
    if named is None:
        return None
    resumed = (folder / RECIPE_FILE).exists()

    def find() -> Profile | None:
        if (folder / PROFILE_FILE).exists():
            return Profile.load(folder / PROFILE_FILE)
        if named == AUTO:
            if resumed:  # a run that began without a profile continues without one
                return None
            weights = fast_path(model).usual_weights() if device.type == "cpu" else "model"
            return find_profile(profile_setting(model, sizes, weights, device))
        if not Path(named).is_file():
            raise ConfigError(
                f"schedule.profile {named!r}: no such file; write one with `skipdecode calibrate --output`"
            )
        return Profile.load(Path(named))

    found = on_first_process(find)
    if found is None:
        return None
    own = profile_setting(model, sizes, "model", device)
    for key in _SHAPE:
        if found.setting.get(key) != own[key]:
            raise ConfigError(
                f"schedule.profile {named!r} is for another model: its {key} is {found.setting.get(key)}, but this "
                f"model's is {own[key]}"
            )
    return found
