"""The Trainer of `train.py`: trains under schedules, writes sealed checkpoints, stops where a loss isn't finite."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from skipdecode import ConfigError
from skipdecode.families import longest_sequence
from skipdecode.training.mixin import SkipTrainingMixin
from train.checkpoints import SealedCheckpointTrainer, resume_advice
from train.stops import FiniteLoss, RunStopped


class SkipTrainer(SkipTrainingMixin, SealedCheckpointTrainer):
    """Trains as `SkipTrainingMixin` does, with checkpoints that resume exactly.

    A loss that isn't finite ends the run with RunStopped, before the broken weights are saved.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._finite_loss = FiniteLoss()

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Watch the loss of the step."""
        loss = super().training_step(*args, **kwargs)
        self._finite_loss.watch(loss)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Stop where the logged loss or gradient isn't finite."""
        super().log(logs, start_time)
        # The logged values are means over ranks, so all ranks stop together. In fp16 a step whose gradient overflows is
        # skipped, which is no error.
        watched = ["loss"] if self.args.fp16 else ["loss", "grad_norm"]
        for name in watched:
            if not math.isfinite(logs.get(name, 0.0)):
                self._stop(f"{name} is {logs[name]} at step {self.state.global_step}")

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Watch the gradient too: the step's loss says nothing of the weights that the step leaves behind."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]
        if norm is not None and not self.args.fp16:
            self._finite_loss.watch(torch.as_tensor(norm, device=self.args.device))
        return norm

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self._finite_loss.broken(self.args.device):
            self._stop(f"the loss or its gradient was infinite or NaN before step {self.state.global_step}")
        super()._save_checkpoint(model, trial)

    def _stop(self, reason: str) -> None:
        advice = resume_advice(Path(str(self.args.output_dir)))
        raise RunStopped(
            f"{reason}: {advice}; if it stops there again, start a new run with output.dir=FOLDER and a lower "
            "optim.learning_rate"
        )

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save tied weights once: DeepSpeed passes copies of tensors, in which a tied head is separate."""
        if state_dict is not None:
            tied = getattr(self.model, "all_tied_weights_keys", {})
            state_dict = {name: value for name, value in state_dict.items() if name not in tied}
        super()._save(output_dir, state_dict)


def check_positions(model: PreTrainedModel, needed: int) -> None:
    """Raise ConfigError where a batch needs more positions than the model has."""
    positions = longest_sequence(model.config)
    if positions is not None and needed > positions:
        raise ConfigError(
            f"the longest prompt and completion need {needed} positions, but the model has {positions}: "
            "lower data.max_prompt_tokens or data.max_completion_tokens, or use a model with more positions"
        )
