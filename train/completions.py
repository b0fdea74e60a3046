"""Completions that a fine-tuned model wrote, to train on in place of the data's (sequence-level distillation)."""

from itertools import islice
from pathlib import Path

from data import Task
from eval.score.predictions import read_predictions
from skipdecode import ConfigError
from train.recipe import Recipe


def written_completions(recipe: Recipe, task: Task) -> dict[str, str] | None:
    """The texts of `data.completions` by the id of the training example; None where the recipe names no file.

    Training on a teacher's outputs is sequence-level distillation (Kim and Rush 2016, arXiv 1606.07947).

    Raises ConfigError for a file that can't be read or lacks an example, and for tasks whose targets can't be replaced:
    conversations, and targets with placeholders.
    """
    path = recipe.data.completions
    if path is None:
        return None
    try:
        predictions = read_predictions(Path(path))
    except ConfigError as error:
        raise ConfigError(f"data.completions: {error}") from error
    found = {}
    for example in islice(task.stream("train"), recipe.data.limit):
        if example.chat or example.substitutions:
            held = "conversations" if example.chat else "placeholders (data.options.delexicalise)"
            raise ConfigError(f"data.completions is {path!r}: it can't replace the targets of data with {held}")
        line = predictions.get(example.id)
        if line is None or line.prompt != example.prompt:
            raise ConfigError(
                f"data.completions is {path!r}: it has no prediction for the prompt of {example.id}, "
                f"{example.prompt[:60]!r}: write it with `python -m eval --split train`, from the same data with the "
                "same options"
            )
        found[example.id] = line.prediction
    return found
