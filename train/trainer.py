"""Hugging Face's Trainer with a sampled schedule in each step and the completion loss."""

import time
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

from skipdecode import ConfigError, SkipSchedule, skip_layers
from skipdecode.attach import LayerGate
from skipdecode.checkpoint import SkipConfig
from skipdecode.families import decoder_layers, text_config
from train.objective import DepthBands, completion_loss, distillation_loss, predicting_budgets
from train.sampling import ScheduleSampler


class SkipTrainer(Trainer):
    """Trains under the schedules of a sampler; expects batches as `data.columns.ColumnCollator` lays them out.

    Beside the Trainer's own, it logs over the steps since the last log: `layers_per_token`, `layer_column_share` (the
    layer-columns computed, as a share of full depth's), `speedup_target` (means), `tokens_per_second` (of completions)
    and the loss by band of depth (`loss_layers_1_to_3`, …).
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
        prompt_columns: int = inputs["prompt_columns"]
        labels = inputs["labels"][:, prompt_columns:]  # [batch, new tokens]
        columns = {name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids")}
        columns["logits_to_keep"] = labels.shape[1] + 1  # from the prompt's last column on
        draws = self.sampler.at(self.state.global_step)
        teacher: torch.Tensor | None = None  # what the model says at full depth, [batch, new tokens + 1, vocabulary]
        losses: list[torch.Tensor] = []
        for target, schedule in draws:  # full depth, where it is drawn, is the first
            with skip_layers(model, schedule, prompt_columns=prompt_columns) as gate:
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
                **self.bands.take(),
            }
            self._reset_window()
        super().log(logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Every saved checkpoint carries the schedules that trained it (law 4)."""
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            self.skip_config.save(output_dir or str(self.args.output_dir))


def check_positions(model: PreTrainedModel, needed: int) -> None:
    """Raise ConfigError where a batch of `needed` columns has more positions than the model."""
    positions = getattr(text_config(model.config), "max_position_embeddings", None)
    if positions is not None and needed > positions:
        raise ConfigError(
            f"the longest prompt and completion need {needed} positions, the model has {positions}: "
            "lower data.max_prompt_tokens or data.max_completion_tokens, or take a model with more positions"
        )
