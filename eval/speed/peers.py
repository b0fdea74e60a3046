"""Decoders that are timed in turns: this library and transformers; others are in `served.py`."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from skipdecode import SkipSchedule, skip_generate
from skipdecode.generate.request import GenerativeModel
from skipdecode.kernels.linear import Weights
from skipdecode.timing.step_clock import generate_timed


class TimedDecoder(ABC):
    """A decoder that can be timed."""

    name: str

    @abstractmethod
    def run(self, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
        """Generate `new_tokens` tokens greedily for `ids` [batch, prompt length]. Returns prefill and decode seconds.

        Prefill ends with the first new token, decode with the last.
        """


class Transformers(TimedDecoder):
    """`model.generate` of transformers, with its default cache or its static cache (compiled on CUDA)."""

    def __init__(self, model: GenerativeModel, *, static: bool = False) -> None:
        self.name = "transformers, static cache" if static else "transformers"
        self._model = model
        self._options: dict[str, Any] = {"cache_implementation": "static"} if static else {}

    def run(self, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
        request: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": None, "pad_token_id": 0}
        clock = generate_timed(self._model, ids, **request, **self._options).clock
        return clock.prefill_seconds, clock.decode_seconds


class SkipDecode(Transformers):
    """`skip_generate` with a schedule."""

    def __init__(self, model: GenerativeModel, schedule: SkipSchedule, weights: Weights, name: str) -> None:
        super().__init__(model)
        self.name = name
        self._options = {"custom_generate": skip_generate, "schedule": schedule, "weights": weights}
