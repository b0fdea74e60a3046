"""Wall-clock times of one call of `model.generate`: of the prefill and of each decode step."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from skipdecode.generate.request import GenerativeModel


class StepClock(StoppingCriteria):
    """A stopping criterion that never stops anything and records when tokens were generated.

    It works with any decoding loop of transformers. The prefill ends when the first token is chosen; decoding is the
    time from there to the last token. A loop that generates several tokens at once shows them together.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._looks = [(0, self._now())]  # length of the sequences and time; first the start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self.look(input_ids.shape[1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def look(self, length: int) -> None:
        """Record the time when sequences have this length."""
        self._looks.append((length, self._now()))

    @property
    def steps(self) -> int:
        """Number of decode steps: of tokens after the first."""
        return self._looks[-1][0] - self._looks[1][0] if len(self._looks) > 1 else 0

    @property
    def step_seconds(self) -> list[float]:
        """The seconds of each decode step; of several that were shown together, their mean."""
        return [
            (after - before) / (to - since)
            for (since, before), (to, after) in zip(self._looks[1:], self._looks[2:], strict=False)
            for _ in range(to - since)
        ]

    @property
    def prefill_seconds(self) -> float:
        """Seconds from the creation of this clock to the first token."""
        return self._looks[min(1, len(self._looks) - 1)][1] - self._looks[0][1]

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first token to the last."""
        return self._looks[-1][1] - self._looks[1][1] if len(self._looks) > 1 else 0.0

    def _now(self) -> float:
        if self._on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass(frozen=True)
class TimedGeneration:
    """The token ids of prompts and new tokens [batch, length] from a call of `model.generate`, and its clock."""

    ids: torch.Tensor
    clock: StepClock


def generate_timed(
    model: GenerativeModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    stopping_criteria: Sequence[StoppingCriteria] = (),
    **options: Any,
) -> TimedGeneration:
    """Call `model.generate` on prompts [batch, prompt length], greedily unless the options say otherwise, and time it.

    Without an attention mask all prompts are equally long. Options are further arguments of `generate`.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    options = {"do_sample": False, "return_dict_in_generate": False, **options}
    clock = StepClock(model.device)
    criteria = StoppingCriteriaList([*stopping_criteria, clock])
    ids: torch.Tensor = model.generate(input_ids=input_ids, attention_mask=mask, stopping_criteria=criteria, **options)
    return TimedGeneration(ids, clock)
