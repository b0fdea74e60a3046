"""The stages of a run after its training, and the one that comes next, kept in the run's folder until all are done."""

from pathlib import Path
from typing import Literal, TypeAlias, get_args

from eval.card import CARD, EVALUATION
from eval.results import FILE_NAME
from skipdecode import ConfigError
from skipdecode.files import write_atomically
from train.recipe import Recipe

NEXT_STAGE_FILE = "next_stage"


Stage: TypeAlias = Literal[
    "the evaluation", "the results in W&B", "the model card", "publishing", "the checkpoint in W&B"
]
STAGES: tuple[Stage, ...] = get_args(Stage)  # in the order in which they are done


def asked_stages(recipe: Recipe) -> tuple[Stage, ...]:
    """The stages that a recipe asks for."""
    evaluates, tracks = recipe.evaluation.speedups is not None, recipe.tracking.wandb != "off"
    asked: dict[Stage, bool] = {
        "the evaluation": evaluates,
        "the results in W&B": evaluates and tracks,
        "the model card": recipe.lora.r is None or recipe.lora.merge,  # of a whole checkpoint, not of adapters apart
        "publishing": recipe.publish.repository is not None,
        "the checkpoint in W&B": tracks,
    }
    return tuple(stage for stage in STAGES if asked[stage])


def stages_left(folder: Path, recipe: Recipe) -> tuple[Stage, ...]:
    """The stages that are left of a trained run: all that `recipe` asks for from the first one that isn't done.

    That is the one that `folder` names, or an earlier one whose file isn't there, such as the report of an evaluation
    that the recipe didn't ask for before.

    Raises:
        ConfigError: where the file that names it holds something else.
    """
    asked = asked_stages(recipe)
    files: dict[Stage, Path] = {"the evaluation": folder / EVALUATION / FILE_NAME, "the model card": folder / CARD}
    undone = [stage for stage, file in files.items() if stage in asked and not file.exists()]
    named = folder / NEXT_STAGE_FILE
    if named.exists():
        text = named.read_text(encoding="utf-8", errors="replace").strip()
        if text not in STAGES:
            raise ConfigError(f"{named} holds {text[:80]!r}: expected one of {', '.join(STAGES)}")
        undone += [stage for stage in STAGES if stage == text]
    first = min(map(STAGES.index, undone), default=len(STAGES))
    return tuple(stage for stage in STAGES[first:] if stage in asked)


def set_next_stage(folder: Path, stage: Stage | None) -> None:
    """Name the stage that comes next in a run's folder; None: all are done."""
    if stage is None:
        (folder / NEXT_STAGE_FILE).unlink(missing_ok=True)
    else:
        write_atomically(folder / NEXT_STAGE_FILE, f"{stage}\n")
