"""The wall clock of one call of `model.generate`, prefill and decode apart."""

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
        self._start = self._now()
        self._first: float | None = None
        self._last = self._start
        self.steps = 0  # decode steps: tokens after the first

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self._last = self._now()
        if self._first is None:
            self._first = self._last
        else:
            self.steps += 1
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    @property
    def prefill_seconds(self) -> float:
        """From the making of this clock to the first token."""
        return (self._first or self._last) - self._start

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return self._last - (self._first or self._last)

    def _now(self) -> float:
        if self._on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
