"""Building and checking everything that a run needs, before any file is written."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback, TrainingArguments

from data import Task
from data.chat import Chat
from data.own import OwnText
from data.rows import Encoded, encode_task, row_lengths
from data.task import Split
from skipdecode import ConfigError, CostModel, SkipSchedule
from skipdecode.checkpoint.four_bit import base_weights
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.families import exit_head
from skipdecode.generate.stopping import end_tokens
from skipdecode.schedule.cost import count_parameters
from skipdecode.schedule.lengths import Lengths
from skipdecode.schedule.machine_profile import Profile
from skipdecode.training.arguments import check_layerdrop
from skipdecode.training.collator import PromptCompletionCollator
from skipdecode.training.layer_order import LayerOrder
from skipdecode.training.sampling import ScheduleSampler, default_speedup, make_sampler, settings_of
from train.base_settings import settle_generation
from train.build import as_it_trains, build_model, frozen_teacher
from train.completions import written_completions
from train.data_order import rows_a_step
from train.distributed import check_agreement, prepare_deepspeed, whole_weights
from train.layer_order import AUTO, given_order, measured_order, stand_in_order
from train.machine_profile import run_profile
from train.objective import recipe_objective
from train.recipe import Recipe
from train.trainer import SkipTrainer, check_positions

MAX_EXAMPLE_CHARACTERS = 400  # a longer prompt isn't saved in the checkpoint as its example


@dataclass(frozen=True)
class Prepared:
    """A model with its training rows and its schedules, ready for the Trainer.

    Attributes:
        model: the model to train, inside a PeftModel if it has adapters.
        tokenizer: the model's tokenizer.
        encoded: the training rows.
        validation: rows whose loss is computed at every checkpoint, or None.
        sampler: samples the schedules of each step.
        skip_config: the schedules and settings that the checkpoint will save.
        arguments: the Trainer's arguments.
        left_out: the base model's generation settings that the finished checkpoint omits, each with its file.
        layer_order: the order of layers measured for the run; None where the recipe doesn't ask for one.
        profile: the calibrated profile by which targets were solved; None for the analytical cost model.
        teacher: the frozen model of `optim.teacher`, or None.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    encoded: Encoded
    validation: datasets.Dataset | None
    sampler: ScheduleSampler
    skip_config: SkipConfig
    arguments: TrainingArguments
    left_out: Sequence[str] = ()
    layer_order: LayerOrder | None = None
    profile: Profile | None = None
    teacher: PreTrainedModel | None = None

    @property
    def cost(self) -> CostModel:
        """The cost model of the finished checkpoint's decode steps."""
        return _cost(self.model, self.arguments)

    @property
    def rows_a_step(self) -> int:
        """Rows of one optimiser step, over all processes."""
        return rows_a_step(self.arguments)

    @property
    def steps(self) -> int:
        """Number of optimiser steps in the run, as the Trainer counts them."""
        if self.arguments.max_steps > 0:
            return self.arguments.max_steps
        an_epoch = max(1, math.ceil(len(self.encoded.rows) / self.rows_a_step))
        return math.ceil(self.arguments.num_train_epochs * an_epoch)


def prepare(recipe: Recipe, task: Task, arguments: TrainingArguments, *, measure_order: bool = True) -> Prepared:
    """Build everything that a recipe names.

    Args:
        recipe: the recipe of the run.
        task: its task.
        arguments: from `make_arguments`.
        measure_order: whether to measure the layer order of `schedule.order=auto`; a placeholder is used otherwise.

    Raises:
        ConfigError: for settings and data that can't be used.
    """
    validate_rows = recipe.train.validate_rows
    splits: tuple[Split, ...] = ("train", "validation") if validate_rows else ("train",)
    for split in splits:
        task.files(split)  # a missing file is reported before a large model is loaded
    # ZeRO-3 can't read these in shards.
    unsharded = recipe.model.shape is not None or recipe.model.gguf_file is not None
    with whole_weights(arguments) if unsharded else nullcontext():
        model, tokenizer = build_model(recipe, islice(task.stream("train"), recipe.data.limit))
    with whole_weights(arguments):
        left_out = settle_generation(recipe, model, tokenizer)
    ends = end_tokens(model, tokenizer)
    validation = None
    with arguments.main_process_first(desc="tokenising"):  # the other processes then find the rows in the cache
        encoded = _encode(recipe, task, tokenizer, ends, "train", recipe.data.limit)
        if validate_rows:
            rows = _encode(recipe, task, tokenizer, ends, "validation", validate_rows).rows
            validation = rows.select(range(min(validate_rows, len(rows))))
    check_positions(model, encoded.longest_prompt + encoded.longest_completion)
    if validation is not None:
        check_positions(model, sum(int(lengths.max()) for lengths in row_lengths(validation)))
    check_layerdrop(model.config)
    folder, sizes = Path(str(arguments.output_dir)), _cost(model, arguments)
    layer_order = measured_order(recipe, model, encoded.rows, folder) if measure_order else None
    order = None if layer_order is None else layer_order.order
    profile = run_profile(recipe, model, sizes, folder, arguments.device)
    machine = "cpu" if recipe.schedule.profile == AUTO and arguments.device.type == "cpu" else None
    sampler, skip_config = recipe_sampler(
        recipe, task, sizes, encoded.rows, order=order, profile=profile, machine=machine
    )
    example = tokenizer.decode(encoded.rows[0]["prompt_ids"], skip_special_tokens=True)
    # A user's own data may be private, and the checkpoint may be published.
    if len(example) <= MAX_EXAMPLE_CHARACTERS and task.name not in (OwnText.name, Chat.name):
        skip_config = replace(skip_config, task={**skip_config.task, "example": example})
    start = recipe.model.name_or_path
    if start is not None and not Path(start).exists():  # it was loaded, so it is on the Hub
        skip_config = replace(skip_config, base_model=start)
    skip_config = replace(skip_config, base_weights=base_weights(model))
    if recipe.optim.exits != "last":
        exit_head(model)  # raises ConfigError where the family's final norm isn't known
    trained = as_it_trains(model, recipe)
    teacher = frozen_teacher(recipe, tokenizer)
    found: dict[str, Any] = {"layer_order": layer_order, "profile": profile, "teacher": teacher}
    return Prepared(trained, tokenizer, encoded, validation, sampler, skip_config, arguments, left_out, **found)


def _cost(model: Any, arguments: TrainingArguments) -> CostModel:
    """The cost model for the data type in which the model is saved; DeepSpeed saves in the computation's type."""
    computed = torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else None
    return CostModel.of(model, computed if arguments.deepspeed else None)


def warn_left_out(console: Console, prepared: Prepared) -> None:
    """Print which settings of the base model the finished checkpoint will omit, if any."""
    if prepared.left_out:
        settings = "; ".join(prepared.left_out)
        console.print(
            "the finished checkpoint omits these settings of the base model, which decoding with layer skipping "
            f"doesn't use: {settings}",
            soft_wrap=True,
        )


def introduce(console: Console, name: str, prepared: Prepared) -> None:
    """Print what is about to be trained, with warnings about its settings."""
    model, encoded, arguments = prepared.model, prepared.encoded, prepared.arguments
    processes = arguments.world_size
    held = count_parameters(model.parameters())
    trained = count_parameters(p for p in model.parameters() if p.requires_grad)
    four_bits = ", on a base in 4 bits" if prepared.skip_config.base_weights is not None else ""
    console.print(
        f"{name}: {held / 1e6:.2f} M parameters"
        f"{f' ({trained / 1e6:.2f} M trained{four_bits})' if trained < held else ''}, "
        f"{len(encoded.rows)} rows, {prepared.rows_a_step} per step on {processes} "
        f"process{'es' if processes > 1 else ''}"
    )
    warn_left_out(console, prepared)
    if encoded.prompts_cut:
        console.print(
            f"{encoded.prompts_cut} prompts were truncated to data.max_prompt_tokens: the end of their article or post "
            "was removed"
        )
    if encoded.completions_cut:
        console.print(f"{encoded.completions_cut} completions were truncated to data.max_completion_tokens")
    if arguments.warmup_steps >= prepared.steps:
        console.print(
            f"optim.warmup_steps is {arguments.warmup_steps:g}, but the run has only {prepared.steps} steps: the "
            "learning rate never reaches optim.learning_rate"
        )
    rounded = any(p.requires_grad and p.dtype == torch.bfloat16 for p in model.parameters())
    if rounded and not arguments.deepspeed:
        console.print(
            "model.dtype is bfloat16, so AdamW loses updates smaller than 1/256 of a weight; model.dtype=float32 with "
            "train.precision=bf16 is as fast and loses none"
        )
    source = f"the analytical cost model of a {prepared.skip_config.solver.get('machine', 'gpu').upper()}"
    if prepared.profile is not None:
        processor = prepared.profile.setting.get("processor")
        source = f"a profile calibrated on {processor}, {prepared.profile.date}"
    console.print(f"targets are solved by {source}", soft_wrap=True)
    for line in describe_schedules(prepared):
        console.print(f"  {line}", soft_wrap=True)


def describe_schedules(prepared: Prepared) -> list[str]:
    """One line for each target: its budgets and its predicted speedup."""
    over = prepared.skip_config.over
    cost = prepared.skip_config.cost_for(prepared.cost, profile=prepared.profile)
    kind = "decode" if over == "decode" else "end-to-end"
    return [
        f"target {speedup:g}x: {schedule.max_layers} to {schedule.min_layers} of {schedule.num_layers} layers over "
        f"{schedule.horizon} tokens, {schedule.prompt_depth} for prompts, predicted speedup "
        f"{cost.speedup(schedule, over=over):.2f}x ({kind})"
        for speedup, schedule in zip(prepared.sampler.speedups, prepared.sampler.schedules, strict=True)
    ]


def make_trainer(recipe: Recipe, prepared: Prepared, callbacks: list[TrainerCallback]) -> SkipTrainer:
    """The trainer of a prepared run; the callbacks do all of its output."""
    trainer = SkipTrainer(
        model=prepared.model,
        args=prepared.arguments,
        train_dataset=prepared.encoded.rows,
        eval_dataset=prepared.validation,
        data_collator=PromptCompletionCollator(prepared.tokenizer.pad_token_id),
        processing_class=prepared.tokenizer,
        callbacks=callbacks,
        sampler=prepared.sampler,
        skip_config=prepared.skip_config,
        objective=recipe_objective(recipe.optim),
        teacher=prepared.teacher,
        layer_dropout=recipe.optim.layer_dropout,
        default_speedup=recipe.schedule.default_speedup,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def recipe_sampler(
    recipe: Recipe,
    task: Task,
    cost: CostModel,
    rows: datasets.Dataset | None = None,
    *,
    order: Sequence[int] | None = None,
    profile: Profile | None = None,
    machine: str | None = None,
) -> tuple[ScheduleSampler, SkipConfig]:
    """The recipe's schedules: a sampler for training, and the settings that the checkpoint saves.

    With exits (`optim.exits`) only full depth is trained, and the checkpoint solves any other target as a fixed exit
    layer.

    Args:
        recipe: the recipe of the run.
        task: its task.
        cost: the cost model of the model.
        rows: the training rows, whose lengths targets are solved for; None: lengths follow from the settings alone.
        order: the order measured for `schedule.order=auto`; None: a placeholder is used.
        profile: the calibrated profile by which targets are solved; None: the analytical cost model.
        machine: "gpu" or "cpu", whose rates the analytical cost model uses; None: its default.

    Raises:
        ConfigError: for settings that contradict each other, and as `make_sampler` does.
    """
    section = recipe.schedule
    solver: dict[str, Any] = {
        "horizon": section.horizon or task.horizon,
        "warmup_layers": section.warmup_layers,
        "decay": section.decay,
        "decay_rate": section.decay_rate,
        "placement": section.placement,
        "prompt": section.prompt,
        "spread": section.spread,
        "over": section.over,
        "batch_size": section.batch_size,
    }
    if machine is not None:
        solver["machine"] = machine
    if section.prompt_stop is not None:
        solver["prompt_stop"] = section.prompt_stop
    if section.order is not None:
        if section.order != AUTO:
            order = given_order(section.order, cost.num_layers, "schedule.order")
        solver["order"] = list(order or stand_in_order(cost.num_layers))
    files = None if section.files is None else [SkipSchedule.load(file) for file in section.files]
    if files is not None:
        solver |= settings_of(files)
    if section.prompt_length is not None:
        solver["prompt_length"] = section.prompt_length
    if rows is not None:
        prompts, completions = row_lengths(rows)
        solver |= {"lengths": Lengths.of(completions.tolist()).to_list()}
        solver |= {"prompt_lengths": Lengths.of(prompts.tolist()).to_list()}
    if recipe.optim.exits != "last":
        if section.speedups != [1] or section.speedup_range is not None or section.files is not None:
            raise ConfigError(
                f"optim.exits is {recipe.optim.exits!r}, which trains exits in one full-depth pass: it needs "
                f"schedule.speedups=[1] (now {section.speedups}), and speedup_range and files must be null"
            )
        solver |= {"decay": "constant", "decay_rate": None, "placement": "bottom"}
    sampler = make_sampler(
        cost,
        speedups=section.speedups,
        speedup_range=section.speedup_range,
        schedules=files,
        weights=section.weights,
        sampling=section.sampling,
        seed=recipe.train.seed,
        solver=solver,
        profile=profile,
    )
    _check_effects(recipe, sampler.schedules)
    default_speedup(section.default_speedup, sampler.speedups)  # raises its error before anything is trained
    described = {
        "name": task.name,
        "options": dict(recipe.data.options),
        "max_prompt_tokens": recipe.data.max_prompt_tokens or task.max_prompt_tokens,
    }
    return sampler, sampler.skip_config(solver, task=described)


def _check_effects(recipe: Recipe, schedules: Sequence[SkipSchedule]) -> None:
    """Raises ConfigError for settings without effect under these schedules; `train.effects` sees the recipe alone."""
    section, share = recipe.schedule, recipe.optim.distillation
    self_taught = share and recipe.optim.teacher is None and recipe.optim.exits == "last"
    if self_taught and not any(schedule.skips for schedule in schedules):
        raise ConfigError(
            f"optim.distillation is {share:g}, but no schedule in schedule.files ({section.files}) skips a layer, and "
            "full depth learns from the labels alone; remove optim.distillation"
        )
    skipping = [schedule for schedule in schedules if schedule.min_layers < schedule.num_layers]
    if section.prompt_stop is not None and skipping and not any(schedule.stopped_layers for schedule in skipping):
        raise ConfigError(
            f"schedule.prompt_stop is {section.prompt_stop} and schedule.prompt is {section.prompt!r}: prompts run at "
            f"most {max(schedule.prompt_budget for schedule in skipping)} layers, so they never stop early; lower "
            "schedule.prompt_stop, or remove it"
        )


def _encode(
    recipe: Recipe,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int],
    split: Split,
    limit: int | None,
) -> Encoded:
    section = recipe.data
    return encode_task(
        task,
        tokenizer,
        split,
        max_prompt_tokens=section.max_prompt_tokens or task.max_prompt_tokens,
        max_completion_tokens=section.max_completion_tokens or task.max_new_tokens,
        end_tokens=ends,
        limit=limit,
        completions=written_completions(recipe, task) if split == "train" else None,
        num_proc=section.num_proc,
        cache_dir=section.cache_dir,
    )


def make_arguments(recipe: Recipe, folder: Path) -> TrainingArguments:
    """The Trainer's arguments for a run into `folder`, where nothing is written; making them starts torch.distributed.

    They are made before the model, because ZeRO-3 reads pretrained weights directly into shards. Raises ConfigError for
    settings that can't be used on this machine.
    """
    optim, section = recipe.optim, recipe.train
    # LoRA and DeepSpeed both keep the trained weights in float32.
    float32_copy = recipe.lora.r is not None or recipe.deepspeed.config is not None
    if recipe.model.dtype == "float16" and not float32_copy:
        raise ConfigError(
            "model.dtype is 'float16', in which AdamW's updates overflow to NaN: keep model.dtype=float32 and set "
            "train.precision for a faster computation"
        )
    on_cpu = not torch.accelerator.is_available()
    if recipe.model.dtype == "float16" and section.precision == "bf16" and on_cpu and recipe.deepspeed.config is None:
        raise ConfigError("model.dtype 'float16' with train.precision 'bf16' needs a GPU: set model.dtype=bfloat16")
    if section.precision == "fp16" and on_cpu:
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
            logging_nan_inf_filter=False,  # the filter would hide a loss that isn't finite
            seed=section.seed,
            train_sampling_strategy="group_by_length",
            remove_unused_columns=False,
            report_to=["wandb"] if recipe.tracking.wandb != "off" else [],
            deepspeed=deepspeed,
            use_cpu=on_cpu,  # without it, each of torchrun's processes would train alone
            dataloader_pin_memory=not on_cpu,
            accelerator_config={"non_blocking": not on_cpu},  # without it the next batch waits for the step
            disable_tqdm=True,  # train.progress shows the bar
        )
    except (ValueError, ImportError) as error:
        raise ConfigError(f"these training settings can't be used: {' '.join(str(error).split())}") from error
    if arguments.n_gpu > 1:  # the Trainer would use DataParallel, whose model copies don't follow the schedule
        raise ConfigError(
            f"one process sees {arguments.n_gpu} GPUs: start one process for each with torchrun --nproc_per_node "
            f"{arguments.n_gpu} train.py …, or make a single GPU visible with CUDA_VISIBLE_DEVICES=0"
        )
    if recipe.deepspeed.config is not None:
        check_agreement(recipe.deepspeed.config, arguments)
    return arguments
