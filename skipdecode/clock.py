"""The wall clock of one call of `model.generate`: prefill, and every decode step."""

import time

import torch
from transformers import StoppingCriteria


class StepClock(StoppingCriteria):
    """A stopping criterion that never stops anything and notes when each token was there.

    Works alike with any decoding loop of transformers. The prefill ends when the first token is chosen; decoding is the
    time from there to the last token.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._times = [self._now()]  # the start, then when each token was chosen

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self._times.append(self._now())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    @property
    def steps(self) -> int:
        """Decode steps: tokens after the first."""
        return max(0, len(self._times) - 2)

    @property
    def step_seconds(self) -> list[float]:
        """Of each decode step."""
        return [after - before for before, after in zip(self._times[1:], self._times[2:], strict=False)]

    @property
    def prefill_seconds(self) -> float:
        """From the making of this clock to the first token."""
        return self._times[min(1, len(self._times) - 1)] - self._times[0]

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return sum(self.step_seconds)

    def _now(self) -> float:
        if self._on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
