"""The prefill as a CUDA graph: the hundreds of kernels of short prompts take longer to launch than to run.

Prompts are padded on the left to a multiple of PROMPT_GRAIN, and the padding runs too: so all prompts of a shape are
the same kernels on the same memory. A graph is captured when its shape is used for the second time.
"""

from collections.abc import Sequence
from typing import Any

import torch

from skipdecode.fastpath.graph_capture import GraphRecorder, Replay
from skipdecode.fastpath.kv_cache import PlannedCache
from skipdecode.fastpath.model import FastDecoder
from skipdecode.fastpath.prompt_inputs import PromptInputs

# Prompts whose lengths round up to the same multiple of this share buffers and graphs.
PROMPT_GRAIN = 64
# Of a batch, padding included: to run more takes longer than to launch the kernels.
MAX_PROMPT_TOKENS = 2048


def pad_to_multiple(tensor: torch.Tensor, grain: int) -> torch.Tensor:
    """Tokens, a mask or positions [batch, length] with zeros on the left, up to a multiple of `grain`."""
    missing = -tensor.shape[1] % grain
    return torch.nn.functional.pad(tensor, (missing, 0)) if missing else tensor


class PromptGraph:
    """The prefill of prompts of one shape, into one cache, through the same layers.

    Args:
        layers: the numbers of those that run, ascending.
        stop: as for `FastDecoder.prefill`.
    """

    def __init__(self, cache: PlannedCache, layers: Sequence[int], stop: int | None) -> None:
        self._cache = cache
        self._layers = layers
        self._stop = stop
        self._buffers: list[torch.Tensor] = []  # tokens, position ids, cosines, sines, bias, of those that there are
        self._replay: Replay | None = None
        self._logits: list[torch.Tensor] = []

    def run(
        self, decoder: FastDecoder, tokens: torch.Tensor, inputs: PromptInputs, recorder: GraphRecorder
    ) -> torch.Tensor:
        """Run prompts and fill the cache, which must be empty.

        Args:
            decoder: the model's; always the same one.
            tokens: the prompts [batch, length].
            inputs: of these prompts, from `FastDecoder.prompt_inputs` with `keep_padding`.
            recorder: captures the graph.

        Returns:
            Logits of the last tokens [batch, vocabulary].
        """
        width, flat = inputs.width, tokens.flatten()
        if not self._buffers:
            self._buffers = [tensor.clone() for tensor in _tensors(flat, inputs)]
            logits = decoder.padded_prefill(flat, self._layers, self._cache, inputs, self._stop)
        else:
            for buffer, tensor in zip(self._buffers, _tensors(flat, inputs), strict=True):
                buffer.copy_(tensor)
            if self._replay is None:
                self._replay = self._record(decoder, inputs, recorder)
            self._replay()
            logits = self._logits[0].clone()  # a graph of the steps may write where these are
        held: list[Any] = self._cache.layers
        for layer in held:
            layer.length = width if layer.is_initialized else 0
        return logits

    def _record(self, decoder: FastDecoder, inputs: PromptInputs, recorder: GraphRecorder) -> Replay:
        tokens, *rest = self._buffers
        position_ids = rest.pop(0) if inputs.position_ids is not None else None
        rotary = (rest.pop(0), rest.pop(0)) if inputs.rotary is not None else None
        bias = rest.pop(0) if inputs.bias is not None else None
        batch, width, last = inputs.batch, inputs.width, inputs.last

        def forward() -> None:
            self._cache.reset()  # type: ignore[no-untyped-call]
            static = PromptInputs(batch, width, None, last, position_ids, rotary, bias)
            self._logits[:] = [decoder.padded_prefill(tokens, self._layers, self._cache, static, self._stop)]

        return recorder.record(forward, tokens.device)


def _tensors(tokens: torch.Tensor, inputs: PromptInputs) -> list[torch.Tensor]:
    found = [tokens, inputs.position_ids, *(inputs.rotary or ()), inputs.bias]
    return [tensor for tensor in found if tensor is not None]
