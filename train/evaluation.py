"""The evaluation after training; its settings are checked before training."""

import gc
import shlex
from itertools import islice
from pathlib import Path

import torch

from data import Task
from eval.card import EVALUATION
from eval.decoding import encode_test_set
from eval.request import Request
from eval.results import Report
from eval.run import computable_metrics, evaluate
from eval.score.scores import choose_metrics
from skipdecode import ConfigError
from train.prepare import Prepared
from train.recipe import Recipe


def check_evaluation(recipe: Recipe, task: Task, prepared: Prepared) -> None:
    """Raise ConfigError where the evaluation that the recipe asks for would be refused after training."""
    section = recipe.evaluation
    if section.speedups is None:
        return
    try:
        examples = list(islice(task.stream("test"), section.limit))
        if not examples:
            raise ConfigError(f"the test split of {task.name} is empty")
        computable_metrics(task, examples, choose_metrics(task.metrics), tokenizer=section.tokenizer)
        encode_test_set(
            prepared.model,
            prepared.tokenizer,
            examples,
            max_prompt_tokens=recipe.data.max_prompt_tokens or task.max_prompt_tokens,
            max_new_tokens=section.max_new_tokens or task.max_new_tokens,
        )
        cost = prepared.cost
        batch = [prepared.skip_config.prompt_length] * section.batch_size
        for speedup in section.speedups:
            prepared.skip_config.plan_for(cost, speedup, prompts=[batch], strict=True)
    except ConfigError as error:
        raise ConfigError(
            f"the evaluation after training would fail: {error} (evaluation.speedups=null turns it off)"
        ) from error


def release_memory() -> None:
    """Free the memory of unused objects, such as a trainer with its optimiser."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def evaluate_run(recipe: Recipe, task: Task, folder: Path) -> Report:
    """Evaluate the finished checkpoint in the folder of a run."""
    release_memory()
    section = recipe.evaluation
    words = ["--checkpoint", str(folder), "--speedup", *(f"{speedup:g}" for speedup in section.speedups or ())]
    for option, value in (
        ("--data-dir", recipe.data.path),
        ("--limit", section.limit),
        ("--batch-size", section.batch_size),
        ("--max-new-tokens", section.max_new_tokens),
        ("--tokenizer", section.tokenizer),
    ):
        words += [option, str(value)] if value is not None else []
    words += ["--trust-remote-code"] if recipe.model.trust_remote_code else []
    return evaluate(
        Request(
            command=shlex.join(["python", "-m", "eval", *words, "--output", str(folder / EVALUATION)]),
            checkpoint=str(folder),
            trust_remote_code=recipe.model.trust_remote_code,
            output=folder / EVALUATION,
            speedups=tuple(section.speedups or ()),
            task=task.name,
            data_dir=recipe.data.path,
            limit=section.limit,
            batch_size=section.batch_size,
            max_new_tokens=section.max_new_tokens,
            tokenizer=section.tokenizer,
        )
    )
