"""The profile of a machine that a run's targets are solved by: kept with the run, measured on a machine, or none."""

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
_SHAPE = ("model_type", "num_layers", "layer_parameters", "head_parameters")  # of a profile's setting


def run_profile(recipe: Recipe, model: Any, sizes: CostModel, folder: Path, device: torch.device) -> Profile | None:
    """The profile of a run: the one that `folder` holds, else the one that `schedule.profile` names.

    None where the recipe names none, and with `auto` where this machine has none of such a model, or had none when the
    run began: targets then follow from the analytical cost model.

    Args:
        recipe: of the run.
        model, sizes: that is trained, before adapters.
        folder: of the run.
        device: that it trains on.

    Raises:
        ConfigError: for a file that can't be read, or is of a model of another shape.
    """
    named = recipe.schedule.profile
    if named is None:
        return None
    resumed = (folder / RECIPE_FILE).exists()

    def find() -> Profile | None:
        if (folder / PROFILE_FILE).exists():
            return Profile.load(folder / PROFILE_FILE)
        if named == AUTO:
            if resumed:  # a run that began without one ends without one
                return None
            weights = fast_path(model).usual_weights() if device.type == "cpu" else "model"
            return find_profile(profile_setting(model, sizes, weights, device))
        if not Path(named).is_file():
            raise ConfigError(f"schedule.profile {named!r}: no such file; `skipdecode calibrate --output` writes one")
        return Profile.load(Path(named))

    found = on_first_process(find)
    if found is None:
        return None
    own = profile_setting(model, sizes, "model", device)
    for key in _SHAPE:
        if found.setting.get(key) != own[key]:
            raise ConfigError(
                f"schedule.profile {named!r} is of another model: its {key} is {found.setting.get(key)}, and this "
                f"model's {own[key]}"
            )
    return found
