"""OpenAI's penalties for tokens that an answer already has."""

import torch
from transformers import LogitsProcessor


class TokenPenalties(LogitsProcessor):
    """Lowers the logits of generated tokens: by `presence` once, and by `frequency` for each time that they occur.

    The prompt's tokens don't count (OpenAI's API reference, presence_penalty and frequency_penalty).

    Args:
        prompt_length: tokens of the prompt.
        presence: from -2 to 2.
        frequency: from -2 to 2.
    """

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self._prompt_length, self._presence, self._frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The penalised logits [1, vocabulary], given the prompt and the generated tokens [1, length]."""
        counts = torch.bincount(input_ids[0, self._prompt_length :], minlength=scores.shape[-1])
        return scores - self._frequency * counts - self._presence * (counts > 0)
