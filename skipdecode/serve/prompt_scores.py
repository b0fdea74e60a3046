"""Log probabilities of a prompt's own tokens, as `echo` with `logprobs` returns them."""

import asyncio
import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import torch

from skipdecode.engine.sequence import GeneratedToken
from skipdecode.errors import ConfigError
from skipdecode.families import unwrap
from skipdecode.gating import skip_layers
from skipdecode.generate.request import GenerativeModel
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.schedule import SkipSchedule

_ROWS = 256  # tokens whose probabilities are computed at once: for all of a prompt they could need gigabytes


class PromptScorer:
    """Scores prompts in a thread of its own, one after the other.

    The first token of a prompt has no probability. The others run the layers that they would run if they had been
    generated after it, in one forward pass (invariant 3, docs/how-it-works.md): so a benchmark that scores texts in
    this way measures the model at the speed of the request.

    Args:
        model: it isn't changed.
        weights: the engine's; the pass itself runs the model's own weights.
    """

    def __init__(self, model: GenerativeModel, weights: Weights | None) -> None:
        self._original, self._weights = unwrap(model), weights
        self._model: Any = None
        self._thread = ThreadPoolExecutor(1, "skipdecode-scores")

    async def __call__(self, prompt: Sequence[int], schedule: SkipSchedule, top: int) -> list[GeneratedToken]:
        """The prompt's tokens with their log probabilities and those of the `top` likeliest tokens.

        Raises:
            ConfigError: if the engine runs quantised weights, for which this pass would give other probabilities.
        """
        if self._weights not in (None, "model", "packed"):
            raise ConfigError(f"echo with logprobs needs the model's own weights: this server runs {self._weights}")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._score, prompt, schedule, top)

    def close(self) -> None:
        """End the thread, without the prompts that wait."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    @torch.no_grad()
    def _score(self, prompt: Sequence[int], schedule: SkipSchedule, top: int) -> list[GeneratedToken]:
        tokens = torch.tensor(prompt, device=self._original.device)
        scored = [GeneratedToken(prompt[0])]
        if len(prompt) == 1:
            return scored
        if self._model is None:
            self._model = _copy_with_the_same_weights(self._original)
        with skip_layers(self._model, schedule, prompt_columns=1):
            logits = self._model(tokens[None, :-1], use_cache=False).logits[0]  # [prompt length - 1, vocabulary]
        for rows, following in zip(logits.split(_ROWS), tokens[1:].split(_ROWS), strict=True):
            logprobs = rows.float().log_softmax(dim=-1)
            values, likeliest = logprobs.topk(top)
            chosen = logprobs.gather(1, following[:, None])[:, 0]
            columns = (following.tolist(), chosen.tolist(), likeliest.tolist(), values.tolist())
            scored += [
                GeneratedToken(token, logprob, tuple(zip(ids, probabilities, strict=True)))
                for token, logprob, ids, probabilities in zip(*columns, strict=True)
            ]
        return scored


def _copy_with_the_same_weights(model: Any) -> Any:
    """A model of other modules with the same parameters: the engine must not see the layers that a pass attaches."""
    held = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, held)
