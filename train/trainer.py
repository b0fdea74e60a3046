"""Hugging Face's Trainer with a sampled schedule in each step and the completion loss."""

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
from train.checkpoints import SealedCheckpointTrainer, resume_advice
from train.exits import Exits, run_exits
from train.objective import BANDS, DepthBands, Objective, token_losses, unpack_batch
from train.sampling import Draw, ScheduleSampler
from train.stops import FiniteLoss, RunStopped

VALIDATED = 5  # targets at most that a validation runs: of a range, as many evenly spaced ones


class SkipTrainer(SealedCheckpointTrainer):
    """Trains under the schedules of a sampler; expects batches as `data.columns.ColumnCollator` lays them out.

    Beside the Trainer's own, it logs over the steps since the last log, of all processes: `layers_per_token`,
    `layer_column_share` (the layer-columns computed, as a share of full depth's), `speedup_target` (means),
    `tokens_per_second` (of completions) and the loss by band of depth (`loss_layers_1_to_3`, …). A validation gives
    `eval_loss`, the mean over targets, and the loss at each (`eval_loss_2x`).

    Args:
        sampler, skip_config, objective: of the recipe.
        teacher: a frozen model for `Objective.frozen_teacher`.

    A loss that is infinite or no number ends the run with RunStopped, before such weights are saved.
    """

    def __init__(
        self,
        *,
        sampler: ScheduleSampler,
        skip_config: SkipConfig,
        objective: Objective,
        teacher: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.teacher = None if teacher is None else teacher.to(self.args.device).eval()
        self.sampler = sampler
        self.skip_config = skip_config
        self.objective: Objective = objective
        self.model_accepts_loss_kwargs = True  # compute_loss divides by the totals of the whole step
        self.bands = DepthBands(len(decoder_layers(kwargs["model"])))
        self._shares: Iterator[torch.Tensor] = iter(())
        self._finite_loss = FiniteLoss()
        self._validated = validated_draws(sampler)
        self._validation = torch.zeros(len(self._validated) + 1, dtype=torch.float64)  # losses, and tokens
        self._reset_window()

    def _reset_window(self) -> None:
        self._window_start = 0.0  # of the clock; set as its first step begins
        self._run_columns = self._skipped_columns = 0
        self._target_sum = 0.0
        self._passes = self._tokens = self._token_passes = self._layers = 0

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], torch.Tensor]:
        """The parts of an optimiser step, and for its `num_items_in_batch` the objective's totals of the whole step.

        Over all parts and processes, so that the step is the same however its rows are divided.
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
        """A pass forward and backward under each schedule of this optimiser step, one after the other.

        Each is a step of the Trainer's own, and all but the last leave its gradients to be summed: as with batches that
        are accumulated, processes average them once, and DeepSpeed steps once.
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
            on_pass=self._count_columns,
            teacher=self.teacher,
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
        """The share of the next schedule of this optimiser step, for `training_step`."""
        loss = next(self._shares)
        return loss * int(self.accelerator.num_processes)  # its totals are all ranks', whose gradients are averaged

    def _count_columns(self, gate: LayerGate) -> None:
        self._run_columns += gate.layer_positions
        self._skipped_columns += gate.layer_positions_skipped

    def _count(self, draws: tuple[Draw, ...], inputs: dict[str, Any]) -> None:
        """Add a batch to the figures of the next log."""
        _, _, labels = unpack_batch(inputs)
        self._passes += len(draws)
        self._target_sum += sum(draw.speedup for draw in draws)
        tokens = (labels != IGNORED).sum(dim=0).tolist()  # by step
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
        prompt_columns, columns, labels = unpack_batch(self._prepare_inputs(inputs))
        figures = []
        for _, schedule in self._validated:
            with (
                torch.no_grad(),
                self.compute_loss_context_manager(),
                skip_layers(model, schedule, prompt_columns=prompt_columns),
            ):
                logits = model(**columns).logits
            figures.append(token_losses(logits[:, :-1], labels).sum(dim=1))
        figures.append((labels != IGNORED).sum(dim=1))
        mine = torch.stack(figures, dim=1)  # [batch, targets + 1]
        # Of every row once: where they don't fill the processes' last batches, accelerate repeats some.
        self._validation += self.accelerator.gather_for_metrics(mine).cpu().double().sum(dim=0)
        return None, None, None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Validate, and give each target's loss by token beside their mean."""
        self._validation.zero_()
        with self._beside_the_window():
            output: EvalLoopOutput = super().evaluation_loop(*args, **kwargs)
        *sums, tokens = self._validation.tolist()
        losses = {draw.speedup: total / tokens for draw, total in zip(self._validated, sums, strict=True)}
        assert output.metrics is not None
        output.metrics["eval_loss"] = sum(losses.values()) / len(losses)
        output.metrics.update({f"eval_loss_{speedup:g}x": loss for speedup, loss in losses.items()})
        return output

    @contextmanager
    def _beside_the_window(self) -> Iterator[None]:
        """Leave what is done here out of the time of the steps."""
        start = time.perf_counter()
        yield
        self._window_start += time.perf_counter() - start

    def _window(self) -> dict[str, float]:
        """The figures of the steps since the last call, of all processes."""
        elapsed = time.perf_counter() - self._window_start
        mine = [self._tokens, self._token_passes, self._layers, self._run_columns, self._skipped_columns]
        figures = torch.tensor([*mine, *self.bands.sums, *self.bands.counts], dtype=torch.float64)
        if self.accelerator.num_processes > 1:
            figures = self.accelerator.reduce(figures.to(self.args.device), reduction="sum")
        tokens, token_passes, layers, run, skipped, *bands = figures.tolist()
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
        """Add the figures of the steps since the last log."""
        if "loss" in logs and self._passes:
            logs = {**logs, **self._window()}
        super().log(logs, start_time)
        # The Trainer's mean over ranks: all of them stop. In fp16 a gradient that overflows is a step to be skipped.
        watched = ["loss"] if self.args.fp16 else ["loss", "grad_norm"]
        for name in watched:
            if not math.isfinite(logs.get(name, 0.0)):
                self._stop(f"{name} is {logs[name]} at step {self.state.global_step}")

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Watch it, too: the step's loss is of the weights before it."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]
        if norm is not None and not self.args.fp16:
            self._finite_loss.watch(torch.as_tensor(norm, device=self.args.device))
        return norm

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self._finite_loss.broken(self.args.device):
            self._stop(f"the loss or its gradient was infinite or no number before step {self.state.global_step}")
        with self._beside_the_window():
            super()._save_checkpoint(model, trial)

    def _stop(self, reason: str) -> None:
        advice = resume_advice(Path(str(self.args.output_dir)))
        raise RunStopped(
            f"{reason}: {advice}; where it ends there again, start anew with output.dir=FOLDER and a lower "
            "optim.learning_rate"
        )

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Every saved checkpoint carries the schedules that trained it (law 4)."""
        if state_dict is not None:
            # DeepSpeed hands over copies, in which a tied head is a tensor of its own: saved, it would come twice.
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
) -> Iterator[torch.Tensor]:
    """The shares of an objective for a batch, each with its pass through the model, as `Objective.shares` gives them.

    Args:
        batch: as `data.columns.ColumnCollator` lays it out, on the model's device.
        schedules, totals, bands: as in `Objective.shares`.
        autocast: what the model's passes run under, for what an exit runs outside of them.
        on_pass: called with the gate of each pass under a schedule, after it.
        teacher: a frozen model, in evaluation mode; None: the model itself teaches.
    """
    prompt_columns, columns, labels = unpack_batch(batch)

    def run(schedule: SkipSchedule, **changes: Any) -> torch.Tensor:
        with skip_layers(model, schedule, prompt_columns=prompt_columns, keep_in_graph=True) as gate:
            logits: torch.Tensor = model(**{**columns, **changes}).logits
        if on_pass is not None:
            on_pass(gate)
        return logits

    @torch.no_grad()
    def teach() -> torch.Tensor:
        """Give the teacher's logits: of a frozen model, or of the model itself when it skips and drops out nothing."""
        if teacher is not None:
            with autocast():
                taught: torch.Tensor = teacher(**columns).logits
            return taught
        model.eval()
        logits: torch.Tensor = model(**columns).logits
        model.train()
        return logits

    def every_exit(schedule: SkipSchedule) -> Exits:
        # The pass ends in logits that nothing needs, of one column: DDP finds in their graph what has a gradient.
        return run_exits(model, lambda: run(schedule, logits_to_keep=1), labels.shape[1], autocast)

    return objective.shares(schedules, labels, run, teach, every_exit, totals=totals, bands=bands)


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
    positions = longest_sequence(model.config)
    if positions is not None and needed > positions:
        raise ConfigError(
            f"the longest prompt and completion need {needed} positions, the model has {positions}: "
            "lower data.max_prompt_tokens or data.max_completion_tokens, or take a model with more positions"
        )
