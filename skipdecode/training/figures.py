"""The figures that training logs beside the loss: layers, positions, speed, memory, and the loss by depth."""

import resource
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import TrainerCallback

from skipdecode.gating import LayerGate
from skipdecode.training.batch_layout import IGNORED
from skipdecode.training.kept_values import KeptValues
from skipdecode.training.objective import BANDS, DepthBands
from skipdecode.training.sampling import Draw


class StepFigures(TrainerCallback):
    """Sums over the steps since the last log. As a callback it stops the clock between steps.

    Attributes:
        bands: the losses by depth.
        passes: number of forward and backward passes.
    """

    def __init__(self, num_layers: int) -> None:
        self.bands = DepthBands(num_layers)
        self._kept = KeptValues()
        self._reset()

    def _reset(self) -> None:
        self._seconds = self._clock = 0.0
        self._run_positions = self._skipped_positions = 0
        self._target_sum = 0.0
        self.passes = 0
        self._tokens = self._token_passes = self._layers = 0.0

    def start_clock(self) -> None:
        """Start the clock at the beginning of a step."""
        self._clock = time.perf_counter()

    def _stop_clock(self) -> None:
        now = time.perf_counter()
        self._seconds, self._clock = self._seconds + now - self._clock, now

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (control.should_evaluate or control.should_save) and args.device.type != "cpu":
            torch.accelerator.synchronize(args.device)  # these would wait for the step, with the clock stopped
        self._stop_clock()

    # A validation or a checkpoint that comes between a step and its log isn't part of the step.
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start_clock()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start_clock()

    def add_pass(self, gate: LayerGate) -> None:
        """Add the positions that a pass ran and skipped."""
        self._run_positions += gate.layer_positions
        self._skipped_positions += gate.layer_positions_skipped

    def add_batch(self, draws: Sequence[Draw], labels: torch.Tensor) -> None:
        """Add a batch, of labels [batch, new tokens], that ran under the schedules of `draws`."""
        self.passes += len(draws)
        self._target_sum += sum(draw.speedup for draw in draws)
        self._kept.keep((labels != IGNORED).sum(dim=0), partial(self._add_tokens, draws))  # [new tokens]

    def _add_tokens(self, draws: Sequence[Draw], tokens: list[float]) -> None:
        self._tokens += sum(tokens)
        self._token_passes += sum(tokens) * len(draws)
        for draw in draws:
            self._layers += sum(count * draw.schedule.budget(step) for step, count in enumerate(tokens))

    def take(self, accelerator: Any, device: torch.device) -> dict[str, float]:
        """The figures of the steps since the last call, over all processes, each of which must call this."""
        self._stop_clock()  # the loss to be logged has been waited for since the step's end
        self._kept.read()
        self.bands.read()
        counts = [self._tokens, self._token_passes, self._layers, self._run_positions, self._skipped_positions]
        sums = torch.tensor([*counts, *self.bands.sums, *self.bands.counts], dtype=torch.float64)
        if accelerator.num_processes > 1:
            sums = accelerator.reduce(sums.to(device), reduction="sum")
        tokens, token_passes, layers, run, skipped, *bands = sums.tolist()
        self.bands.sums, self.bands.counts = bands[:BANDS], bands[BANDS:]
        found = {
            "speedup_target": self._target_sum / self.passes,
            "layers_per_token": layers / token_passes,
            "layer_column_share": run / (run + skipped),
            "tokens_per_second": tokens / self._seconds,
            "peak_memory_gib": peak_memory_bytes(device) / 2**30,
            **self.bands.take(),
        }
        self._reset()
        return found


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory in bytes: of the tensors on a CUDA device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
