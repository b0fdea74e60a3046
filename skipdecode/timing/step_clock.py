"""The wall clock of one call of `model.generate`: prefill, and every decode step."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from skipdecode.generate.request import GenerativeModel


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


@dataclass(frozen=True)
class TimedGeneration:
    """A call of `model.generate` and its clock.

    Attributes:
        ids: prompts and new tokens [batch, columns].
        clock: which has seen all of them.
    """

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
    """Call `model.generate`, greedily unless the options say otherwise, and time it.

    Args:
        model: a causal language model of transformers.
        input_ids: prompts [batch, columns].
        attention_mask: [batch, columns]; None where all prompts are equally long.
        stopping_criteria: beside the clock.
        options: what else `generate` is given.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    options = {"do_sample": False, "return_dict_in_generate": False, **options}
    clock = StepClock(model.device)
    criteria = StoppingCriteriaList([*stopping_criteria, clock])
    ids: torch.Tensor = model.generate(input_ids=input_ids, attention_mask=mask, stopping_criteria=criteria, **options)
    return TimedGeneration(ids, clock)
