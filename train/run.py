"""A training run, from a resolved recipe to a finished checkpoint."""

import gc
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from omegaconf import OmegaConf
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from data import Example, Task
from data.columns import ColumnCollator, Encoded, encode_pairs
from eval.files import write_whole
from eval.report import FILE_NAME, Report
from eval.run import Request, evaluate
from skipdecode import ConfigError, CostModel, SkipSchedule
from skipdecode.checkpoint import SkipConfig
from skipdecode.cost import count_parameters
from train.adapters import add_adapters, merge_adapters
from train.build import build_model, build_task
from train.checkpoints import PARTIAL, last_complete_checkpoint, resume_advice
from train.distributed import check_agreement, check_world_size, prepare_deepspeed, whole_weights
from train.recipe import Recipe
from train.sampling import ScheduleSampler, make_sampler
from train.stops import RunStopped, StopOnSignal
from train.tracking import MetricsFile, TimeEstimate, start_wandb
from train.trainer import SkipTrainer, check_positions

RECIPE_FILE = "recipe.yaml"
EVALUATION = "eval"  # the folder in a finished run's


def run(recipe: Recipe, name: str) -> Path:
    """Train what `recipe` says, evaluate it, and return the finished run's folder, which is itself a checkpoint.

    A run that was cut off continues from its last complete checkpoint when it is started again with the same recipe.

    Raises:
        ConfigError: before anything is written, for settings and data that can't be used.
        RunStopped: where the run can't go on, after what can be saved is.
    """
    console = Console(stderr=True, quiet=not _is_first_process())
    folder = Path(str(recipe.output.dir))
    if _is_first_process():  # which alone writes there, soon
        _check_folder(folder, recipe)
    task = build_task(recipe)
    if not _is_finished(folder):
        _train(recipe, name, task, folder, console)
    if recipe.evaluation.speedups is not None and _is_first_process():
        _evaluate(recipe, task, folder)
    console.print(f"finished: {folder} is a checkpoint; python -m eval --checkpoint {folder} shows its speeds")
    return folder


def _train(recipe: Recipe, name: str, task: Task, folder: Path, console: Console) -> None:
    examples = task.load("train")
    arguments = _arguments(recipe, folder)  # before the model: ZeRO-3 reads pretrained weights straight into shards
    with whole_weights(arguments) if recipe.model.shape is not None else nullcontext():
        model, tokenizer = build_model(recipe, examples)
    encoded = _encode(recipe, task, tokenizer, examples)
    validation = None
    if recipe.train.validate_rows:
        held_out = _encode(recipe, task, tokenizer, task.load("validation"))
        validation = Dataset.from_list(held_out.rows[: recipe.train.validate_rows])
    check_positions(model, _longest(encoded))
    sampler, skip_config = _schedules(recipe, task, model)
    trained = add_adapters(model, recipe.lora)

    folder.mkdir(parents=True, exist_ok=True)
    if _is_first_process():
        write_whole(folder / RECIPE_FILE, recipe.to_yaml())
    _introduce(console, name, trained, encoded, sampler, arguments)
    tracked = start_wandb(recipe, name, folder)
    if recipe.train.gradient_checkpointing:
        # Renamed in transformers 5.23; the old name goes in 6.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        if recipe.lora.r is not None:
            model.enable_input_require_grads()  # else nothing that is checkpointed has a gradient to carry
    stop = StopOnSignal()
    trainer = SkipTrainer(
        model=trained,
        args=arguments,
        train_dataset=Dataset.from_list(encoded.rows),
        eval_dataset=validation,
        data_collator=ColumnCollator(tokenizer.pad_token_id),
        processing_class=tokenizer,
        callbacks=[MetricsFile(folder), TimeEstimate(console), stop],
        sampler=sampler,
        skip_config=skip_config,
        depth_weight_power=recipe.optim.depth_weight_power,
        label_smoothing=recipe.optim.label_smoothing,
        distillation=recipe.optim.distillation,
    )
    # One rank looks, and all continue from the same.
    chosen = [last_complete_checkpoint(folder, console) if _is_first_process() else None]
    if arguments.world_size > 1:
        broadcast_object_list(chosen)
    if chosen[0] is not None:
        check_world_size(chosen[0], arguments.world_size)
        console.print(f"continuing from {chosen[0]}")
    trainer.train(resume_from_checkpoint=chosen[0])
    if stop.stopped and trainer.state.global_step < trainer.state.max_steps:
        raise RunStopped(f"SIGTERM after step {trainer.state.global_step}: {resume_advice(folder)}", status=143)
    _finish(trainer, recipe, tokenizer, folder)
    if tracked:
        import wandb

        wandb.finish()


def _encode(recipe: Recipe, task: Task, tokenizer: PreTrainedTokenizerBase, examples: list[Example]) -> Encoded:
    return encode_pairs(
        tokenizer,
        examples,
        max_prompt_tokens=recipe.data.max_prompt_tokens or task.max_prompt_tokens,
        max_completion_tokens=recipe.data.max_completion_tokens or task.max_new_tokens,
    )


def _is_first_process() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _is_finished(folder: Path) -> bool:
    return (folder / "config.json").exists() or (folder / "adapter_config.json").exists()


def _check_folder(folder: Path, recipe: Recipe) -> None:
    """A folder may be new, empty, or hold the cut-off run of the same recipe; anything else is refused."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    advice = "choose another with output.dir=FOLDER, or remove it"
    if not folder.is_dir():
        raise ConfigError(f"output.dir {folder} is a file: {advice}")
    left = recipe.evaluation.speedups is not None and not (folder / EVALUATION / FILE_NAME).exists()
    if _is_finished(folder) and not left:
        raise ConfigError(f"output.dir {folder} already holds a finished run: {advice}")
    if not (folder / RECIPE_FILE).exists():
        if [file.name for file in folder.iterdir()] == [f"{RECIPE_FILE}.partial"]:
            return  # killed while it was written
        raise ConfigError(f"output.dir {folder} holds files that are no run's: {advice}")
    if (folder / RECIPE_FILE).read_text(encoding="utf-8") != recipe.to_yaml():
        raise ConfigError(
            f"output.dir {folder} holds an unfinished run of another recipe ({_difference(folder, recipe)}): {advice}"
        )


def _difference(folder: Path, recipe: Recipe) -> str:
    """Such as `optim.learning_rate was 0.001, is 0.002`."""
    before = _flat(OmegaConf.to_container(OmegaConf.load(folder / RECIPE_FILE)))
    now = _flat(recipe.model_dump())
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return ", ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in changed)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    nested = [_flat(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in values.items()]
    return {key: value for part in nested for key, value in part.items()}


def _schedules(recipe: Recipe, task: Task, model: PreTrainedModel) -> tuple[ScheduleSampler, SkipConfig]:
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
        CostModel.of(model),
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


def _longest(encoded: Encoded) -> int:
    """Columns of the widest batch that could be drawn."""
    return max(len(r["prompt_ids"]) for r in encoded.rows) + max(len(r["completion_ids"]) for r in encoded.rows)


def _arguments(recipe: Recipe, folder: Path) -> TrainingArguments:
    optim, section = recipe.optim, recipe.train
    if section.precision == "fp16" and not torch.accelerator.is_available():
        raise ConfigError("train.precision is 'fp16', which needs a GPU: expected float32 or bf16 on CPU")
    deepspeed = None if recipe.deepspeed.config is None else prepare_deepspeed(recipe.deepspeed.config)
    try:
        arguments = TrainingArguments(
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
            eval_strategy="steps" if section.validate_rows else "no",
            eval_steps=section.save_steps,
            per_device_eval_batch_size=section.per_device_batch_size,
            metric_for_best_model="loss" if section.validate_rows else None,
            load_best_model_at_end=section.finish_with == "best",
            logging_nan_inf_filter=False,  # it would log the mean of the rest
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
    if recipe.deepspeed.config is not None:
        check_agreement(recipe.deepspeed.config, arguments)
    return arguments


def _introduce(
    console: Console,
    name: str,
    model: PreTrainedModel,
    encoded: Encoded,
    sampler: ScheduleSampler,
    arguments: TrainingArguments,
) -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    batch = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * processes
    console.print(
        f"{name}: {count_parameters(model.parameters()) / 1e6:.2f} M parameters, "
        f"{count_parameters(p for p in model.parameters() if p.requires_grad) / 1e6:.2f} M of them trained, "
        f"{len(encoded.rows)} rows, "
        f"{batch} rows a step on {processes} process{'es' if processes > 1 else ''}"
    )
    if encoded.completions_cut:
        console.print(f"{encoded.completions_cut} completions were cut to data.max_completion_tokens")
    cost = CostModel.of(model)
    for speedup, schedule in zip(sampler.speedups, sampler.schedules, strict=True):
        console.print(
            f"  target {speedup:g}x: {schedule.max_layers} to {schedule.min_layers} of {schedule.num_layers} layers "
            f"over {schedule.horizon} tokens, predicted {cost.speedup(schedule):.2f}x"
        )


def _finish(trainer: SkipTrainer, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the final checkpoint beside, then move it in; its config file, the mark of a finished run, comes last."""
    partial = folder / PARTIAL
    trainer.save_model(str(partial))
    unset_hf_deepspeed_config()  # from here on the first process is alone: a model that it makes has to be whole
    if not trainer.is_world_process_zero():
        return
    (partial / "training_args.bin").unlink(missing_ok=True)  # pickled; recipe.yaml says it all
    if recipe.lora.r is not None and recipe.lora.merge:
        base, _ = build_model(recipe, [], tokenizer)
        merge_adapters(base, partial)
    for file in sorted(partial.iterdir(), key=lambda f: f.name in ("config.json", "adapter_config.json")):
        if file.is_dir():
            shutil.rmtree(folder / file.name, ignore_errors=True)
        os.replace(file, folder / file.name)
    partial.rmdir()


def _evaluate(recipe: Recipe, task: Task, folder: Path) -> Report:
    gc.collect()  # the trainer and its optimiser
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    section = recipe.evaluation
    return evaluate(
        Request(
            checkpoint=str(folder),
            output=folder / EVALUATION,
            speedups=tuple(section.speedups or ()),
            task=task.name,
            data_dir=recipe.data.path,
            limit=section.limit,
            batch_size=section.batch_size,
            max_new_tokens=section.max_new_tokens,
        )
    )
