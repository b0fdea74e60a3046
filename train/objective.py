"""The training objective that a recipe names."""

from skipdecode.training.objective import Objective
from train.recipe import OptimSection


def recipe_objective(section: OptimSection) -> Objective:
    """The objective of a recipe's section `optim`."""
    return Objective(
        section.depth_weight_power,
        section.label_smoothing,
        section.distillation,
        exits=section.exits != "last",
        exit_every=section.exit_every if section.exits == "rotating" else 0,
        frozen_teacher=section.teacher is not None,
    )
