"""A mixin for transformers' Trainer and its subclasses, such as TRL's SFTTrainer, that trains under schedules."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from skipdecode.checkpoint.four_bit import base_weights, keep_exact
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.errors import ConfigError
from skipdecode.families import decoder_layers, unwrap
from skipdecode.gating import skip_layers
from skipdecode.internals import prepared_inputs, set_sync_gradients
from skipdecode.schedule.cost import CostModel
from skipdecode.schedule.lengths import Lengths
from skipdecode.schedule.schedule import Sampling, SkipSchedule
from skipdecode.training.arguments import check_arguments, check_layerdrop
from skipdecode.training.batch_layout import IGNORED
from skipdecode.training.collator import PromptCompletionCollator, split_answers
from skipdecode.training.figures import StepFigures
from skipdecode.training.layer_dropout import add_layer_dropout
from skipdecode.training.layer_order import ORDER_ROWS, choose_rows, find_order
from skipdecode.training.objective import Objective, token_losses, unpack_batch
from skipdecode.training.sampling import Draw, ScheduleSampler, make_sampler, settings_of
from skipdecode.training.sampling import default_speedup as checked_default
from skipdecode.training.saving import save_skip_files
from skipdecode.training.step import step_losses, uses_every_parameter

MAX_VALIDATED = 5  # targets that a validation runs: of more, this many evenly spaced ones
MEASURED_ROWS = 10_000  # of a larger dataset, about this many rows, evenly spaced, give its lengths


class SkipTrainingMixin(Trainer):
    """Trains under schedules: `class SkipSFTTrainer(SkipTrainingMixin, SFTTrainer)`, with the mixin first.

    It lays out the rows as prompts and completions (`split_answers`, `PromptCompletionCollator`), draws the schedules
    of each step, computes the loss, and saves with every checkpoint what `skipdecode.load` needs.

    Besides the Trainer's own metrics it logs, over the steps since the last log and over all processes:
    `layers_per_token` and `speedup_target` (means), `layer_column_share` (the computed pairs of layer and position, as
    a share of full depth's), `tokens_per_second` (of completions) and the loss by band of depth (`loss_layers_1_to_3`,
    …). A validation logs `eval_loss`, the mean over targets, and the loss at each target (`eval_loss_2x`).

    Args:
        model: the Trainer's.
        args: the Trainer's.
        data_collator: None, or a `PromptCompletionCollator`.
        *others: the Trainer's further positional arguments.
        speedups: target speedups to train for, such as (1, 2, 3).
        schedules: schedules to train under, instead of speedups.
        weights: see `make_sampler`.
        sampling: see `ScheduleSampler`.
        horizon: tokens over which budgets decay; None: the median length of the training rows' completions.
        order: the layers, the most important first, such as `find_order(...).order`; "auto": measured on the training
            rows before training; None: the solver's placement.
        solver: further keyword arguments of `solve_schedule`, such as `{"over": "all", "prompt": "max"}`.
        objective: the loss.
        teacher: a frozen model that teaches every schedule, with the same tokenizer; it needs
            `Objective(distillation=…, frozen_teacher=True)`.
        layer_dropout: see `add_layer_dropout`.
        default_speedup: see `skipdecode.training.sampling.default_speedup`.
        sampler: samples the schedules of each step, instead of all of the above that describe schedules; `skip_config`
            goes with it.
        skip_config: the schedules and settings that every checkpoint saves.
        **kwargs: the Trainer's further keyword arguments.

    Raises:
        ConfigError: before training, for arguments and rows that can't be used, such as packing.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        *others: Any,
        speedups: Sequence[float] | None = None,
        schedules: Sequence[SkipSchedule] | None = None,
        weights: Sequence[float] | None = None,
        sampling: Sampling = "one",
        horizon: int | None = None,
        order: Sequence[int] | Literal["auto"] | None = None,
        solver: Mapping[str, Any] | None = None,
        objective: Objective = Objective(),  # noqa: B008  # it is frozen
        teacher: nn.Module | None = None,
        layer_dropout: float = 0.0,
        default_speedup: float | None = None,
        sampler: ScheduleSampler | None = None,
        skip_config: SkipConfig | None = None,
        **kwargs: Any,
    ) -> None:
        check_arguments(args, data_collator, kwargs)
        if objective.frozen_teacher != (teacher is not None):
            raise ConfigError("teacher and objective.frozen_teacher go together: set both or neither")
        if (sampler is None) != (skip_config is None) or (sampler is not None and (speedups or schedules)):
            raise ConfigError("sampler and skip_config go together, in place of speedups and schedules")
        super().__init__(model, args, data_collator, *others, **kwargs)
        trained: Any = self.model
        check_layerdrop(unwrap(trained).config)
        keep_exact(trained)
        self.args.remove_unused_columns = False  # it would keep the columns that the model's forward pass names
        self.train_dataset = self._answers(self.train_dataset)
        self.eval_dataset = self._answers(self.eval_dataset)
        if data_collator is None:
            self.data_collator = PromptCompletionCollator(getattr(self.processing_class, "pad_token_id", None) or 0)
        if sampler is None or skip_config is None:
            settings = solver_settings(self.train_dataset, horizon, solver) | settings_of(schedules or [])
            if order == "auto":
                order = measured_order(trained, self.train_dataset, self.args.seed)
            if order is not None:
                settings |= {"placement": "order", "order": list(order)}
            targets: Any = {"speedups": speedups, "schedules": schedules, "weights": weights, "sampling": sampling}
            sampler = make_sampler(CostModel.of(trained), seed=self.args.seed, solver=settings, **targets)
            skip_config = sampler.skip_config(settings, base_model(trained))
            skip_config = replace(skip_config, base_weights=base_weights(trained))
        checked_default(default_speedup, sampler.speedups)
        if objective.exits and [schedule.skips for schedule in sampler.schedules] != [False]:
            raise ConfigError("objective.exits trains exits in one pass at full depth: it needs speedups=(1,)")
        add_layer_dropout(trained, layer_dropout)
        self.teacher = None if teacher is None else teacher.to(self.args.device).eval()
        self.sampler: ScheduleSampler = sampler
        self.skip_config: SkipConfig = skip_config
        self.objective: Objective = objective
        self.default_speedup = default_speedup
        self.model_accepts_loss_kwargs = True  # compute_loss divides by the whole step's totals
        self.figures = StepFigures(len(decoder_layers(trained)))
        self.add_callback(self.figures)
        self._shares: Iterator[torch.Tensor] = iter(())
        self._validated = validated_draws(sampler)
        self._validation = torch.zeros(len(self._validated) + 1, dtype=torch.float64)  # loss sums, number of tokens

    def _answers(self, dataset: Any) -> Any:
        """The Trainer's dataset, or each of several, with one row for each answer."""
        if dataset is None or isinstance(dataset, str):
            return dataset
        if isinstance(dataset, dict):
            return {name: self._answers(one) for name, one in dataset.items()}
        # TRL has tokenised the rows and, in its later versions, truncated them too.
        keep_end = getattr(self.args, "truncation_mode", "keep_start") == "keep_end"
        with self.args.main_process_first(desc="splitting answers"):
            return split_answers(dataset, max_length=getattr(self.args, "max_length", None), keep_end=keep_end)

    def create_accelerator_and_postprocess(self) -> None:
        """Let DDP search each pass for parameters without a gradient only where there may be some."""
        chosen = self.args.ddp_find_unused_parameters
        if chosen is None and self.model is not None and uses_every_parameter(self.model):
            self.args.ddp_find_unused_parameters = False
        super().create_accelerator_and_postprocess()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return super().get_eval_dataloader(self._answers(eval_dataset))

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], torch.Tensor]:
        """The batches of an optimiser step, with the objective's totals of the whole step as `num_items_in_batch`.

        The totals cover all batches and processes, so that the step is the same however its rows are divided.
        """
        self.figures.start_clock()
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        schedules = self.sampler.schedules_at(self.state.global_step)
        mine = torch.stack([self.objective.totals(schedules, unpack_batch(batch)[2]) for batch in batches]).sum(dim=0)
        totals: torch.Tensor = self.accelerator.reduce(mine.to(device), reduction="sum")
        return batches, totals

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Run a forward and a backward pass under each schedule of this optimiser step, one after the other.

        Each is a training step of the Trainer's. All but the last only accumulate gradients, as in gradient
        accumulation: processes average them once, and DeepSpeed steps once.
        """
        assert isinstance(num_items_in_batch, torch.Tensor)  # from `get_batch_samples`
        inputs = prepared_inputs(self, inputs)
        draws = self.sampler.at(self.state.global_step)
        self._shares = step_losses(
            model,
            inputs,
            [draw.schedule for draw in draws],
            self.objective,
            totals=num_items_in_batch,
            bands=self.figures.bands,
            autocast=self.accelerator.autocast,
            on_pass=self.figures.add_pass,
            teacher=self.teacher,
            step=self.state.global_step,
        )
        state, synchronises = self.accelerator.gradient_state, self.accelerator.sync_gradients
        losses = []
        for left in reversed(range(len(draws))):
            with self.accelerator.no_sync(model) if left and synchronises else nullcontext():
                set_sync_gradients(state, synchronises and not left)
                losses.append(super().training_step(model, inputs, num_items_in_batch))
        self.figures.add_batch(draws, unpack_batch(inputs)[2])
        return torch.stack(losses).sum()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """The loss of the next schedule of this optimiser step, for `training_step`."""
        loss = next(self._shares)
        # The totals are summed over ranks, and then gradients are averaged over them.
        return loss * int(self.accelerator.num_processes)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, None, None]:
        """Add a validation batch to the losses at the targets that are validated."""
        prompt_columns, arguments, labels = unpack_batch(prepared_inputs(self, inputs))
        sums = []
        for _, schedule in self._validated:
            with (
                torch.no_grad(),
                self.compute_loss_context_manager(),
                skip_layers(model, schedule, prompt_columns=prompt_columns),
            ):
                logits = model(**arguments).logits
            sums.append(token_losses(logits[:, :-1], labels).sum(dim=1))
        sums.append((labels != IGNORED).sum(dim=1))
        by_row = torch.stack(sums, dim=1)  # [batch, targets + 1]
        # accelerate repeats rows to fill the last batches; gather_for_metrics drops the repetitions.
        self._validation += self.accelerator.gather_for_metrics(by_row).cpu().double().sum(dim=0)
        return None, None, None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Validate, and report the loss per token at each target and their mean."""
        self._validation.zero_()
        output: EvalLoopOutput = super().evaluation_loop(*args, **kwargs)
        *sums, tokens = self._validation.tolist()
        losses = {draw.speedup: total / tokens for draw, total in zip(self._validated, sums, strict=True)}
        assert output.metrics is not None
        name = "_".join([kwargs.get("metric_key_prefix", "eval"), "loss"])
        output.metrics[name] = sum(losses.values()) / len(losses)
        output.metrics.update({f"{name}_{speedup:g}x": loss for speedup, loss in losses.items()})
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log with the figures of the steps since the last log."""
        if "loss" in logs and self.figures.passes:
            logs = {**logs, **self.figures.take(self.accelerator, self.args.device)}
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the schedules with every checkpoint, so that it decodes under those that trained it."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            save_skip_files(output_dir or str(self.args.output_dir), self.skip_config, self.default_speedup)


def validated_draws(sampler: ScheduleSampler) -> tuple[Draw, ...]:
    """The targets that a validation runs: all, or MAX_VALIDATED of them from the slowest to the fastest."""
    draws = sorted(map(Draw, sampler.speedups, sampler.schedules), key=lambda draw: draw.speedup)
    if len(draws) <= MAX_VALIDATED:
        return tuple(draws)
    return tuple(draws[round(n * (len(draws) - 1) / (MAX_VALIDATED - 1))] for n in range(MAX_VALIDATED))


def solver_settings(rows: Any, horizon: int | None, solver: Mapping[str, Any] | None) -> dict[str, Any]:
    """The keyword arguments of `solve_schedule` with which targets are solved for training rows.

    Raises ConfigError where the horizon isn't given and the rows, which are streamed, don't tell it.
    """
    settings = dict(solver or {})
    if horizon is not None:
        settings["horizon"] = horizon
    if hasattr(rows, "__len__"):
        measured = [rows[number] for number in range(0, len(rows), -(-len(rows) // MEASURED_ROWS))]
        completions = [len(row["completion_ids"]) for row in measured]
        settings.setdefault("horizon", round(statistics.median(completions)))
        settings.setdefault("lengths", Lengths.of(completions).to_list())
        settings.setdefault("prompt_lengths", Lengths.of(len(row["prompt_ids"]) for row in measured).to_list())
    elif "horizon" not in settings:
        raise ConfigError("train_dataset has no length, so the median completion isn't known: pass horizon, in tokens")
    return settings


def measured_order(model: nn.Module, rows: Any, seed: int) -> tuple[int, ...]:
    """The order of the model's layers on some of the rows, which is that of the first process in all of them."""
    found = [find_order(model, choose_rows(rows, ORDER_ROWS, seed=seed)).order]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(found)
    return found[0]


def base_model(model: nn.Module) -> str | None:
    """The name on the Hub of the model that training starts from; None for a folder or random weights."""
    name = unwrap(model).name_or_path
    return name if name and not Path(name).exists() else None
