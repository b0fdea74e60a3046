"""Hugging Face's Trainer with schedules sampled for each step and the completion loss."""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import EvalLoopOutput

from skipdecode import ConfigError, SkipSchedule, skip_layers
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.families import decoder_layers, longest_sequence
from skipdecode.gating import LayerGate
from skipdecode.training.batch_layout import IGNORED
from skipdecode.training.exits import Exits, run_exits
from skipdecode.training.layer_dropout import add_layer_dropout
from skipdecode.training.objective import BANDS, DepthBands, Objective, token_losses, unpack_batch
from skipdecode.training.sampling import Draw, ScheduleSampler
from train.checkpoints import SealedCheckpointTrainer, resume_advice
from train.stops import FiniteLoss, RunStopped

MAX_VALIDATED = 5  # targets that a validation runs: of more, this many evenly spaced ones


class SkipTrainer(SealedCheckpointTrainer):
    """Trains under the schedules of a sampler, on batches from `data.batches.BatchCollator`.

    Besides the Trainer's own metrics it logs, over the steps since the last log and over all processes:
    `layers_per_token` and `speedup_target` (means), `layer_column_share` (the computed pairs of layer and position, as
    a share of full depth's), `tokens_per_second` (of completions) and the loss by band of depth (`loss_layers_1_to_3`,
    …). A validation logs `eval_loss`, the mean over targets, and the loss at each target (`eval_loss_2x`).

    A loss that isn't finite ends the run with RunStopped, before the broken weights are saved.

    Args:
        sampler: samples the schedules of each step.
        skip_config: the schedules and settings that every checkpoint saves.
        objective: the loss.
        teacher: a frozen model for `Objective.frozen_teacher`.
        layer_dropout: see `add_layer_dropout`.
        **kwargs: the Trainer's arguments.
    """

    def __init__(
        self,
        *,
        sampler: ScheduleSampler,
        skip_config: SkipConfig,
        objective: Objective,
        teacher: nn.Module | None = None,
        layer_dropout: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        add_layer_dropout(kwargs["model"], layer_dropout)
        self.teacher = None if teacher is None else teacher.to(self.args.device).eval()
        self.sampler = sampler
        self.skip_config = skip_config
        self.objective: Objective = objective
        self.model_accepts_loss_kwargs = True  # compute_loss divides by the whole step's totals
        self.bands = DepthBands(len(decoder_layers(kwargs["model"])))
        self._shares: Iterator[torch.Tensor] = iter(())
        self._finite_loss = FiniteLoss()
        self._validated = validated_draws(sampler)
        self._validation = torch.zeros(len(self._validated) + 1, dtype=torch.float64)  # loss sums, number of tokens
        self._reset_window()

    def _reset_window(self) -> None:
        self._window_start = 0.0  # seconds; set when the window's first step begins
        self._run_positions = self._skipped_positions = 0
        self._target_sum = 0.0
        self._passes = self._tokens = self._token_passes = self._layers = 0

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], torch.Tensor]:
        """The batches of an optimiser step, with the objective's totals of the whole step as `num_items_in_batch`.

        The totals cover all batches and processes, so that the step is the same however its rows are divided.
        """
        if not self._passes:
            self._window_start = time.perf_counter()
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        schedules = [draw.schedule for draw in self.sampler.at(self.state.global_step)]
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
        inputs = self._prepare_inputs(inputs)
        draws = self.sampler.at(self.state.global_step)
        self._shares = step_losses(
            model,
            inputs,
            [draw.schedule for draw in draws],
            self.objective,
            totals=num_items_in_batch,
            bands=self.bands,
            autocast=self.accelerator.autocast,
            on_pass=self._count_positions,
            teacher=self.teacher,
            step=self.state.global_step,
        )
        state, synchronises = self.accelerator.gradient_state, self.accelerator.sync_gradients
        losses = []
        for left in reversed(range(len(draws))):
            with self.accelerator.no_sync(model) if left and synchronises else nullcontext():
                state._set_sync_gradients(synchronises and not left)
                losses.append(super().training_step(model, inputs, num_items_in_batch))
        self._count(draws, inputs)
        loss = torch.stack(losses).sum()
        self._finite_loss.watch(loss)
        return loss

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

    def _count_positions(self, gate: LayerGate) -> None:
        self._run_positions += gate.layer_positions
        self._skipped_positions += gate.layer_positions_skipped

    def _count(self, draws: tuple[Draw, ...], inputs: dict[str, Any]) -> None:
        """Add a batch to the metrics of the next log."""
        _, _, labels = unpack_batch(inputs)
        self._passes += len(draws)
        self._target_sum += sum(draw.speedup for draw in draws)
        tokens = (labels != IGNORED).sum(dim=0).tolist()  # [new tokens]
        self._tokens += sum(tokens)
        self._token_passes += sum(tokens) * len(draws)
        for draw in draws:
            self._layers += sum(count * draw.schedule.budget(step) for step, count in enumerate(tokens))

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, None, None]:
        """Add a validation batch to the losses at the targets that are validated."""
        prompt_columns, arguments, labels = unpack_batch(self._prepare_inputs(inputs))
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
        with self._outside_the_window():
            output: EvalLoopOutput = super().evaluation_loop(*args, **kwargs)
        *sums, tokens = self._validation.tolist()
        losses = {draw.speedup: total / tokens for draw, total in zip(self._validated, sums, strict=True)}
        assert output.metrics is not None
        output.metrics["eval_loss"] = sum(losses.values()) / len(losses)
        output.metrics.update({f"eval_loss_{speedup:g}x": loss for speedup, loss in losses.items()})
        return output

    @contextmanager
    def _outside_the_window(self) -> Iterator[None]:
        """Exclude the time spent in this context from the time of the steps."""
        start = time.perf_counter()
        yield
        self._window_start += time.perf_counter() - start

    def _window(self) -> dict[str, float]:
        """The metrics of the steps since the last call, over all processes."""
        elapsed = time.perf_counter() - self._window_start
        counts = [self._tokens, self._token_passes, self._layers, self._run_positions, self._skipped_positions]
        sums = torch.tensor([*counts, *self.bands.sums, *self.bands.counts], dtype=torch.float64)
        if self.accelerator.num_processes > 1:
            sums = self.accelerator.reduce(sums.to(self.args.device), reduction="sum")
        tokens, token_passes, layers, run, skipped, *bands = sums.tolist()
        self.bands.sums, self.bands.counts = bands[:BANDS], bands[BANDS:]
        found = {
            "speedup_target": self._target_sum / self._passes,
            "layers_per_token": layers / token_passes,
            "layer_column_share": run / (run + skipped),
            "tokens_per_second": tokens / elapsed,
            "peak_memory_gib": peak_memory_bytes(self.args.device) / 2**30,
            **self.bands.take(),
        }
        self._reset_window()
        return found

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log with the metrics of the steps since the last log."""
        if "loss" in logs and self._passes:
            logs = {**logs, **self._window()}
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
        with self._outside_the_window():
            super()._save_checkpoint(model, trial)

    def _stop(self, reason: str) -> None:
        advice = resume_advice(Path(str(self.args.output_dir)))
        raise RunStopped(
            f"{reason}: {advice}; if it stops there again, start a new run with output.dir=FOLDER and a lower "
            "optim.learning_rate"
        )

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the schedules with every checkpoint, so that it decodes under those that trained it."""
        if state_dict is not None:
            # DeepSpeed passes copies of tensors, in which a tied head is separate and would be saved twice.
            tied = getattr(self.model, "all_tied_weights_keys", {})
            state_dict = {name: value for name, value in state_dict.items() if name not in tied}
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            self.skip_config.save(output_dir or str(self.args.output_dir))


def step_losses(
    model: nn.Module,
    batch: Mapping[str, Any],
    schedules: Sequence[SkipSchedule],
    objective: Objective,
    *,
    totals: torch.Tensor | None = None,
    bands: DepthBands | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    on_pass: Callable[[LayerGate], None] | None = None,
    teacher: nn.Module | None = None,
    step: int = 0,
) -> Iterator[torch.Tensor]:
    """Yield the loss of each schedule for a batch, as `Objective.shares` does, running the model's passes.

    Args:
        model: the model to train, wrapped or not.
        batch: a batch from `data.batches.BatchCollator`, on the model's device.
        schedules: see `Objective.shares`.
        objective: the loss.
        totals: see `Objective.shares`.
        bands: see `Objective.shares`.
        autocast: makes the precision context of passes outside the model: an exit's head, or the teacher.
        on_pass: called with the gate of each pass under a schedule, after the pass.
        teacher: a frozen model in evaluation mode; None: the model itself teaches.
        step: see `Objective.shares`.
    """
    prompt_columns, arguments, labels = unpack_batch(batch)

    def run(schedule: SkipSchedule, **changes: Any) -> torch.Tensor:
        with skip_layers(model, schedule, prompt_columns=prompt_columns, keep_in_graph=True) as gate:
            logits: torch.Tensor = model(**{**arguments, **changes}).logits
        if on_pass is not None:
            on_pass(gate)
        return logits

    @torch.no_grad()
    def teach() -> torch.Tensor:
        """The logits of the frozen teacher, or of the model itself at full depth without dropout."""
        if teacher is not None:
            with autocast():
                taught: torch.Tensor = teacher(**arguments).logits
            return taught
        model.eval()
        logits: torch.Tensor = model(**arguments).logits
        model.train()
        return logits

    def every_exit(schedule: SkipSchedule) -> Exits:
        # DDP finds the parameters with a gradient in the graph of the pass's output, so logits of one position are
        # kept.
        return run_exits(model, lambda: run(schedule, logits_to_keep=1), labels.shape[1], autocast)

    return objective.shares(schedules, labels, run, teach, every_exit, totals=totals, bands=bands, step=step)


def validated_draws(sampler: ScheduleSampler) -> tuple[Draw, ...]:
    """The targets that a validation runs: all, or MAX_VALIDATED of them from the slowest to the fastest."""
    draws = sorted(map(Draw, sampler.speedups, sampler.schedules), key=lambda draw: draw.speedup)
    if len(draws) <= MAX_VALIDATED:
        return tuple(draws)
    return tuple(draws[round(n * (len(draws) - 1) / (MAX_VALIDATED - 1))] for n in range(MAX_VALIDATED))


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory in bytes: of the tensors on a CUDA device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def check_positions(model: PreTrainedModel, needed: int) -> None:
    """Raise ConfigError where a batch needs more positions than the model has."""
    positions = longest_sequence(model.config)
    if positions is not None and needed > positions:
        raise ConfigError(
            f"the longest prompt and completion need {needed} positions, but the model has {positions}: "
            "lower data.max_prompt_tokens or data.max_completion_tokens, or use a model with more positions"
        )
