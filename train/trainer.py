"""Hugging Face's Trainer with a sampled schedule in each step and the completion loss."""

import math
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import EvalLoopOutput

from skipdecode import ConfigError, SkipSchedule, skip_layers
from skipdecode.attach import LayerGate
from skipdecode.checkpoint import SkipConfig
from skipdecode.families import decoder_layers, text_config
from train.checkpoints import SealedCheckpointTrainer, resume_advice
from train.objective import DepthBands, completion_loss, distillation_loss, predicting_budgets
from train.sampling import Draw, ScheduleSampler
from train.stops import FiniteLoss, RunStopped

VALIDATED = 5  # targets at most that a validation runs: of a range, as many evenly spaced ones


class SkipTrainer(SealedCheckpointTrainer):
    """Trains under the schedules of a sampler; expects batches as `data.columns.ColumnCollator` lays them out.

    Beside the Trainer's own, it logs over the steps since the last log: `layers_per_token`, `layer_column_share` (the
    layer-columns computed, as a share of full depth's), `speedup_target` (means), `tokens_per_second` (of completions)
    and the loss by band of depth (`loss_layers_1_to_3`, …). A validation gives `eval_loss`, the mean over targets, and
    the loss at each (`eval_loss_2x`).

    A loss that is infinite or no number ends the run with RunStopped, before such weights are saved.
    """

    def __init__(
        self,
        *,
        sampler: ScheduleSampler,
        skip_config: SkipConfig,
        depth_weight_power: float = 0.0,
        label_smoothing: float = 0.0,
        distillation: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.sampler = sampler
        self.skip_config = skip_config
        self.depth_weight_power = depth_weight_power
        self.smoothing = label_smoothing
        self.distillation = distillation
        self.model_accepts_loss_kwargs = True  # compute_loss divides by the tokens of the whole accumulated batch
        self.bands = DepthBands(len(decoder_layers(kwargs["model"])))
        self._finite_loss = FiniteLoss()
        self._validated = validated_draws(sampler)
        self._validation_sums = torch.zeros(len(self._validated), dtype=torch.float64)
        self._validation_tokens = 0
        self._reset_window()

    def _reset_window(self) -> None:
        self._window_start = time.perf_counter()
        self._run_columns = self._skipped_columns = 0
        self._target_sum = self._budget_sum = 0.0
        self._passes = self._tokens = 0

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The completion loss of a batch, the mean over the schedules of this optimiser step."""
        prompt_columns, columns, labels = _unpack(inputs)
        draws = self.sampler.at(self.state.global_step)
        teacher: torch.Tensor | None = None  # what the model says at full depth, [batch, new tokens + 1, vocabulary]
        losses: list[torch.Tensor] = []
        for target, schedule in draws:  # full depth, where it is drawn, is the first
            with skip_layers(model, schedule, prompt_columns=prompt_columns, keep_in_graph=True) as gate:
                outputs = model(**columns, use_cache=False)
            self._count(target, schedule, gate, labels)
            loss = self._completion_loss(outputs.logits, labels, schedule, num_items_in_batch)
            if self.distillation and schedule.min_layers < schedule.num_layers:
                if teacher is None:
                    teacher = self._full_depth_logits(model, columns)
                divergence = distillation_loss(
                    outputs.logits[:, :-1], teacher[:, :-1], labels, num_items=num_items_in_batch
                )
                loss = (1 - self.distillation) * loss + self.distillation * divergence
            elif self.distillation:
                teacher = outputs.logits.detach()
            losses.append(loss)
        self._tokens += int((labels >= 0).sum())
        loss = torch.stack(losses).mean()
        self._finite_loss.watch(loss)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # the count is over all ranks, whose gradients are averaged
        return (loss, outputs) if return_outputs else loss

    def _completion_loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        schedule: SkipSchedule,
        num_items: torch.Tensor | int | None,
    ) -> torch.Tensor:
        return completion_loss(
            logits[:, :-1],
            labels,
            predicting_budgets(schedule, labels.shape[1]),
            num_layers=schedule.num_layers,
            num_items=num_items,
            depth_weight_power=self.depth_weight_power,
            label_smoothing=self.smoothing,
            bands=self.bands,
        )

    def _count(self, target: float, schedule: SkipSchedule, gate: LayerGate, labels: torch.Tensor) -> None:
        """Add a pass to the figures of the next log."""
        self._run_columns += gate.layer_columns
        self._skipped_columns += gate.layer_columns_skipped
        self._target_sum += target
        self._budget_sum += schedule.mean_budget(labels.shape[1])
        self._passes += 1

    @staticmethod
    @torch.no_grad()
    def _full_depth_logits(model: torch.nn.Module, columns: dict[str, Any]) -> torch.Tensor:
        """What the model itself says of the same columns when it skips nothing and drops nothing out."""
        model.eval()
        logits: torch.Tensor = model(**columns, use_cache=False).logits
        model.train()
        return logits

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, None, None]:
        """The loss of a validation batch, the mean over the targets that are validated."""
        prompt_columns, columns, labels = _unpack(self._prepare_inputs(inputs))
        sums = []
        for _, schedule in self._validated:
            with (
                torch.no_grad(),
                self.compute_loss_context_manager(),
                skip_layers(model, schedule, prompt_columns=prompt_columns),
            ):
                logits = model(**columns, use_cache=False).logits
            budgets = predicting_budgets(schedule, labels.shape[1])
            sums.append(
                completion_loss(logits[:, :-1], labels, budgets, num_layers=schedule.num_layers, num_items=1).double()
            )
        tokens = int((labels >= 0).sum())
        self._validation_sums += torch.stack(sums).cpu()
        self._validation_tokens += tokens
        return torch.stack(sums).mean().float() / tokens, None, None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Validate, and give each target's loss by token beside their mean."""
        self._validation_sums.zero_()
        self._validation_tokens = 0
        output: EvalLoopOutput = super().evaluation_loop(*args, **kwargs)
        mine = torch.cat([self._validation_sums, torch.tensor([self._validation_tokens], dtype=torch.float64)])
        *sums, tokens = self.accelerator.reduce(mine.float().to(self.args.device), reduction="sum").tolist()
        losses = {draw.speedup: total / tokens for draw, total in zip(self._validated, sums, strict=True)}
        assert output.metrics is not None
        output.metrics["eval_loss"] = sum(losses.values()) / len(losses)
        output.metrics.update({f"eval_loss_{speedup:g}x": loss for speedup, loss in losses.items()})
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the figures of the steps since the last log."""
        if "loss" in logs and self._passes:
            elapsed = time.perf_counter() - self._window_start
            logs = {
                **logs,
                "speedup_target": self._target_sum / self._passes,
                "layers_per_token": self._budget_sum / self._passes,
                "layer_column_share": self._run_columns / (self._run_columns + self._skipped_columns),
                "tokens_per_second": self._tokens / elapsed,
                "peak_memory_gib": peak_memory_bytes(self.args.device) / 2**30,
                **self.bands.take(),
            }
            self._reset_window()
        super().log(logs, start_time)
        # The Trainer's mean over ranks: all of them stop. In fp16 a gradient that overflows is a step to be skipped.
        watched = ["loss"] if self.args.fp16 else ["loss", "grad_norm"]
        for name in watched:
            if not math.isfinite(logs.get(name, 0.0)):
                self._stop(f"{name} is {logs[name]} at step {self.state.global_step}")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self._finite_loss.broken(self.args.device):
            self._stop(f"the loss was infinite or no number before step {self.state.global_step}")
        super()._save_checkpoint(model, trial)

    def _stop(self, reason: str) -> None:
        raise RunStopped(f"{reason}: {resume_advice(Path(str(self.args.output_dir)))}, with a lower learning rate")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Every saved checkpoint carries the schedules that trained it (law 4)."""
        if state_dict is not None:
            # DeepSpeed hands over copies, in which a tied head is a tensor of its own: saved, it would come twice.
            tied = getattr(self.model, "all_tied_weights_keys", {})
            state_dict = {name: value for name, value in state_dict.items() if name not in tied}
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            self.skip_config.save(output_dir or str(self.args.output_dir))


def _unpack(inputs: dict[str, Any]) -> tuple[int, dict[str, Any], torch.Tensor]:
    """A collated batch: its prompt columns, what the model is called with, and labels [batch, new tokens]."""
    prompt_columns: int = inputs["prompt_columns"]
    labels = inputs["labels"][:, prompt_columns:]
    columns = {name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids")}
    columns["logits_to_keep"] = labels.shape[1] + 1  # from the prompt's last column on
    return prompt_columns, columns, labels


def validated_draws(sampler: ScheduleSampler) -> tuple[Draw, ...]:
    """The targets that a validation runs: all, or VALIDATED of them from the slowest to the fastest."""
    draws = sorted(map(Draw, sampler.speedups, sampler.schedules), key=lambda draw: draw.speedup)
    if len(draws) <= VALIDATED:
        return tuple(draws)
    return tuple(draws[round(n * (len(draws) - 1) / (VALIDATED - 1))] for n in range(VALIDATED))


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that tensors on the device have taken, or on CPU the process, since the start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def check_positions(model: PreTrainedModel, needed: int) -> None:
    """Raise ConfigError where a batch of `needed` columns has more positions than the model."""
    positions = getattr(text_config(model.config), "max_position_embeddings", None)
    if positions is not None and needed > positions:
        raise ConfigError(
            f"the longest prompt and completion need {needed} positions, the model has {positions}: "
            "lower data.max_prompt_tokens or data.max_completion_tokens, or take a model with more positions"
        )
