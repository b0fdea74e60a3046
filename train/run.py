"""A training run, from a resolved recipe to a finished checkpoint."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from data import Task
from data.columns import ColumnCollator, Encoded, encode_pairs
from eval.files import named_file
from skipdecode import ConfigError, CostModel, SkipSchedule
from skipdecode.checkpoint import SkipConfig
from train.build import build_model, build_task
from train.recipe import DEEPSPEED, Recipe
from train.sampling import ScheduleSampler, make_sampler
from train.tracking import MetricsFile, start_wandb
from train.trainer import SkipTrainer, check_positions

RECIPE_FILE = "recipe.yaml"
_UNFINISHED = "unfinished"  # the final checkpoint is written in here, then moved up file by file


@dataclass(frozen=True)
class Prepared:
    """What a run is made of, before it writes anything."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    encoded: Encoded
    sampler: ScheduleSampler
    skip_config: SkipConfig
    arguments: TrainingArguments

    @property
    def rows_a_step(self) -> int:
        """Rows of an optimiser step, on all processes together."""
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        return self.arguments.per_device_train_batch_size * self.arguments.gradient_accumulation_steps * processes


def run(recipe: Recipe, name: str) -> Path:
    """Train what `recipe` says and return the finished run's folder, which is itself a checkpoint.

    A run that was cut off continues from its last checkpoint when it is started again with the same recipe. Raises
    ConfigError, before anything is written, for settings and data that can't be used.
    """
    console = Console(stderr=True, quiet=not is_first_process())
    folder = Path(str(recipe.output.dir))
    prepared = prepare(recipe, folder)

    folder.mkdir(parents=True, exist_ok=True)
    if is_first_process():
        (folder / RECIPE_FILE).write_text(recipe.to_yaml(), encoding="utf-8")
    _introduce(console, name, prepared)
    tracked = start_wandb(recipe, name, folder)
    trainer = make_trainer(recipe, prepared, callbacks=[MetricsFile(folder)])
    last = get_last_checkpoint(str(folder))
    if last is not None:
        console.print(f"continuing from {last}")
    trainer.train(resume_from_checkpoint=last)
    _finish(trainer, prepared.tokenizer, folder)
    if tracked:
        import wandb

        wandb.finish()
    console.print(f"finished: {folder} is a checkpoint; python -m eval --checkpoint {folder} shows its speeds")
    return folder


def prepare(recipe: Recipe, folder: Path) -> Prepared:
    """Build everything that a run into `folder` needs, and write nothing. Raises ConfigError as `run` does."""
    if is_first_process():  # which alone writes there, soon
        _check_folder(folder, recipe)
    task = build_task(recipe)
    examples = task.load("train")
    model, tokenizer = build_model(recipe, examples)
    encoded = encode_pairs(
        tokenizer,
        examples,
        max_prompt_tokens=recipe.data.max_prompt_tokens or task.max_prompt_tokens,
        max_completion_tokens=recipe.data.max_completion_tokens or task.max_new_tokens,
    )
    check_positions(model, sum(longest(encoded)))
    sampler, skip_config = recipe_sampler(recipe, task, CostModel.of(model))
    return Prepared(model, tokenizer, encoded, sampler, skip_config, _arguments(recipe, folder))


def make_trainer(recipe: Recipe, prepared: Prepared, callbacks: list[TrainerCallback]) -> SkipTrainer:
    """The trainer of what `prepare` built."""
    model = prepared.model
    if recipe.train.gradient_checkpointing:
        # Renamed in transformers 5.23; the old name goes in 6.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return SkipTrainer(
        model=model,
        args=prepared.arguments,
        train_dataset=Dataset.from_list(prepared.encoded.rows),
        data_collator=ColumnCollator(prepared.tokenizer.pad_token_id),
        processing_class=prepared.tokenizer,
        callbacks=callbacks,
        sampler=prepared.sampler,
        skip_config=prepared.skip_config,
        depth_weight_power=recipe.optim.depth_weight_power,
        label_smoothing=recipe.optim.label_smoothing,
        distillation=recipe.optim.distillation,
    )


def is_first_process() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _check_folder(folder: Path, recipe: Recipe) -> None:
    """A folder may be new, empty, or hold the cut-off run of the same recipe; anything else is refused."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    advice = "choose another with output.dir=FOLDER, or remove it"
    if not folder.is_dir():
        raise ConfigError(f"output.dir {folder} is a file: {advice}")
    if (folder / "config.json").exists():
        raise ConfigError(f"output.dir {folder} already holds a finished run: {advice}")
    if not (folder / RECIPE_FILE).exists():
        raise ConfigError(f"output.dir {folder} holds files that are no run's: {advice}")
    if (folder / RECIPE_FILE).read_text(encoding="utf-8") != recipe.to_yaml():
        raise ConfigError(
            f"output.dir {folder} holds an unfinished run of another recipe (see {RECIPE_FILE}): {advice}"
        )


def recipe_sampler(recipe: Recipe, task: Task, cost: CostModel) -> tuple[ScheduleSampler, SkipConfig]:
    """The recipe's schedules, to draw from and to save."""
    section = recipe.schedule
    solver = {
        "horizon": section.horizon or task.horizon,
        "warmup_layers": section.warmup_layers,
        "decay": section.decay,
        "decay_rate": section.decay_rate,
        "placement": section.placement,
        "prompt": section.prompt,
        "spread": section.spread,
        "batch_size": section.batch_size,
        "prompt_length": section.prompt_length,
    }
    sampler = make_sampler(
        cost,
        speedups=section.speedups,
        speedup_range=section.speedup_range,
        schedules=[SkipSchedule.load(file) for file in section.files] if section.files is not None else None,
        weights=section.weights,
        sampling=section.sampling,
        seed=recipe.train.seed,
        solver=solver,
    )
    described = {"name": task.name, "options": dict(recipe.data.options)}
    return sampler, SkipConfig(dict(zip(sampler.speedups, sampler.schedules, strict=True)), solver, described)


def longest(encoded: Encoded) -> tuple[int, int]:
    """Columns of the longest prompt and of the longest completion: the widest batch that could be drawn has both."""
    return max(len(r["prompt_ids"]) for r in encoded.rows), max(len(r["completion_ids"]) for r in encoded.rows)


def _arguments(recipe: Recipe, folder: Path) -> TrainingArguments:
    optim, section = recipe.optim, recipe.train
    deepspeed = None
    if recipe.deepspeed.config is not None:
        deepspeed = str(named_file(recipe.deepspeed.config, DEEPSPEED, ".json", "deepspeed.config"))
    try:
        return TrainingArguments(
            output_dir=str(folder),
            learning_rate=optim.learning_rate,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.beta1,
            adam_beta2=optim.beta2,
            lr_scheduler_type=optim.scheduler,
            warmup_steps=optim.warmup_steps,
            max_grad_norm=optim.max_grad_norm,
            num_train_epochs=section.epochs,
            max_steps=section.max_steps or -1,
            per_device_train_batch_size=section.per_device_batch_size,
            gradient_accumulation_steps=section.gradient_accumulation_steps,
            bf16=section.precision == "bf16",
            fp16=section.precision == "fp16",
            logging_steps=section.logging_steps,
            save_steps=section.save_steps,
            save_total_limit=section.save_total_limit,
            seed=section.seed,
            train_sampling_strategy="group_by_length",
            remove_unused_columns=False,
            report_to=["wandb"] if recipe.tracking.wandb != "off" else [],
            deepspeed=deepspeed,
            use_cpu=not torch.accelerator.is_available(),  # else torchrun's processes would each train alone
            dataloader_pin_memory=torch.accelerator.is_available(),
            disable_tqdm=not sys.stderr.isatty(),
        )
    except (ValueError, ImportError) as error:
        raise ConfigError(f"these training settings can't be used here: {' '.join(str(error).split())}") from error


def _introduce(console: Console, name: str, prepared: Prepared) -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    encoded = prepared.encoded
    console.print(
        f"{name}: {prepared.model.num_parameters() / 1e6:.2f} M parameters, {len(encoded.rows)} rows, "
        f"{prepared.rows_a_step} rows a step on {processes} process{'es' if processes > 1 else ''}"
    )
    if encoded.completions_cut:
        console.print(f"{encoded.completions_cut} completions were cut to data.max_completion_tokens")
    for line in describe_schedules(prepared):
        console.print(f"  {line}")


def describe_schedules(prepared: Prepared) -> list[str]:
    """A line for each schedule that may be drawn."""
    cost = CostModel.of(prepared.model)
    return [
        f"target {speedup:g}x: {schedule.max_layers} to {schedule.min_layers} of {schedule.num_layers} layers "
        f"over {schedule.horizon} tokens, predicted {cost.speedup(schedule):.2f}x"
        for speedup, schedule in zip(prepared.sampler.speedups, prepared.sampler.schedules, strict=True)
    ]


def _finish(trainer: SkipTrainer, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the final checkpoint beside, then move it in; config.json, the mark of a finished run, comes last."""
    partial = folder / _UNFINISHED
    trainer.save_model(str(partial))
    if not trainer.is_world_process_zero():
        return
    (partial / "training_args.bin").unlink(missing_ok=True)  # pickled; recipe.yaml says it all
    for file in sorted(partial.iterdir(), key=lambda f: f.name == "config.json"):
        os.replace(file, folder / file.name)
    shutil.rmtree(partial)
