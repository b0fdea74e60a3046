"""The wall clock of one call of `model.generate`: prefill, and every decode step."""

import time

import torch
from transformers import StoppingCriteria


class StepClock(StoppingCriteria):
    """A stopping criterion that never stops anything and notes when tokens were there.

    Works alike with any decoding loop of transformers. The prefill ends when the first token is chosen; decoding is the
    time from there to the last token. A loop that makes several tokens at a time shows them together.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._looks = [(0, self._now())]  # the start, then how many columns there were when

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self.look(input_ids.shape[1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def look(self, columns: int) -> None:
        """Note the time when texts have so many columns."""
        self._looks.append((columns, self._now()))

    @property
    def steps(self) -> int:
        """Decode steps: tokens after the first."""
        return self._looks[-1][0] - self._looks[1][0] if len(self._looks) > 1 else 0

    @property
    def step_seconds(self) -> list[float]:
        """Of each decode step; of several that were shown together, their mean."""
        return [
            (after - before) / (to - since)
            for (since, before), (to, after) in zip(self._looks[1:], self._looks[2:], strict=False)
            for _ in range(to - since)
        ]

    @property
    def prefill_seconds(self) -> float:
        """From the making of this clock to the first token."""
        return self._looks[min(1, len(self._looks) - 1)][1] - self._looks[0][1]

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return self._looks[-1][1] - self._looks[1][1] if len(self._looks) > 1 else 0.0

    def _now(self) -> float:
        if self._on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
