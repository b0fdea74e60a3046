"""The stages of a run after training; the run's folder holds the name of the next one until all are done."""

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


def requested_stages(recipe: Recipe) -> tuple[Stage, ...]:
    """The stages that a recipe requests, in their order."""
    evaluates, tracks = recipe.evaluation.speedups is not None, recipe.tracking.wandb != "off"
    requested: dict[Stage, bool] = {
        "the evaluation": evaluates,
        "the results in W&B": evaluates and tracks,
        "the model card": recipe.lora.r is None or recipe.lora.merge,  # unmerged adapters get none
        "publishing": recipe.publish.repository is not None,
        "the checkpoint in W&B": tracks,
    }
    return tuple(stage for stage in STAGES if requested[stage])


def stages_left(folder: Path, recipe: Recipe) -> tuple[Stage, ...]:
    """The requested stages of a trained run that remain: from the first one that isn't done.

    The first one is named in the folder, or is an earlier one whose file is missing, such as the report of an
    evaluation that was added to the recipe.

    Raises:
        ConfigError: where the file that names the next stage holds anything else.
    """
    requested = requested_stages(recipe)
    files: dict[Stage, Path] = {"the evaluation": folder / EVALUATION / FILE_NAME, "the model card": folder / CARD}
    undone = [stage for stage, file in files.items() if stage in requested and not file.exists()]
    named = folder / NEXT_STAGE_FILE
    if named.exists():
        text = named.read_text(encoding="utf-8", errors="replace").strip()
        if text not in STAGES:
            raise ConfigError(f"{named} holds {text[:80]!r}: expected one of {', '.join(STAGES)}")
        undone += [stage for stage in STAGES if stage == text]
    first = min(map(STAGES.index, undone), default=len(STAGES))
    return tuple(stage for stage in STAGES[first:] if stage in requested)


def set_next_stage(folder: Path, stage: Stage | None) -> None:
    """Save the name of the next stage in a run's folder; None means that all are done."""
    if stage is None:
        (folder / NEXT_STAGE_FILE).unlink(missing_ok=True)
    else:
        write_atomically(folder / NEXT_STAGE_FILE, f"{stage}\n")
