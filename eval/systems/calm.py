"""CALM-DEC, a baseline: each token exits at the first layer whose prediction is confident enough.

Confident Adaptive Language Modeling (Schuster et al. 2022, arXiv 2207.07061), adapted to decoder-only models as in the
SkipDecode paper: the confidence is the difference between the two largest probabilities that the model's final norm and
LM head predict from a layer's output, and a token exits where it reaches the threshold. The layers above compute their
keys and values from the hidden state at the exit (state propagation). The prompt runs at full depth. The paper also
lets the threshold decay over time; here it is constant.

Exit depths differ between the sequences of a batch, so every sequence waits for the deepest one.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from eval.results import Threshold
from eval.systems.base import Checkpoint, Continued, System
from skipdecode import ConfigError, PlannedCache, SkipSchedule
from skipdecode.families import FAMILIES, BlockParts, decoder_layers
from skipdecode.fastpath.kv_cache import PlannedLayer
from skipdecode.fastpath.layer import FastLayer, rotate
from skipdecode.fastpath.model import FastDecoder
from skipdecode.fastpath.row_compaction import rows_to_keep
from skipdecode.fastpath.step_inputs import StepInputs
from skipdecode.generate.decode_loop import decode_loop
from skipdecode.generate.fast_path import fast_path
from skipdecode.generate.request import DecodeRequest, GenerativeModel
from skipdecode.kernels.linear import MAKERS, Linear, Weights, project_together
from skipdecode.timing.step_clock import generate_timed

# decoder -> the key/value projections of its layers, which hold copies of weights
_KEY_VALUES: weakref.WeakKeyDictionary[FastDecoder, list["KeyValues"]] = weakref.WeakKeyDictionary()


class CalmSystem(System):
    """A checkpoint with confidence exits."""

    kind = "calm"

    def __init__(
        self,
        label: str,
        checkpoint: Checkpoint,
        threshold: Threshold,
        speedup_target: float | None = None,
        planned: float | None = None,
    ) -> None:
        super().__init__(label, checkpoint, speedup_target, planned)
        self.threshold = threshold

    @property
    def cached(self) -> SkipSchedule:
        return SkipSchedule.full_depth(self.checkpoint.num_layers)  # every layer stores keys and values of every token

    def _continue(self, model: GenerativeModel, request: dict[str, Any]) -> Continued:
        exits: list[list[int]] = []
        how: dict[str, Any] = {"custom_generate": calm_generate, "threshold": self.threshold.value, "exits": exits}
        return Continued(generate_timed(model, **request, **how), exits)


def calm_generate(
    model: GenerativeModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    threshold: float = 1.0,
    weights: Weights | None = None,
    exits: list[list[int]] | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Decode with confidence exits: `model.generate(**inputs, custom_generate=calm_generate, threshold=0.9)`.

    Args:
        threshold: λ.
        weights: as in `skip_generate`.
        exits: for each decode step, a list is appended with the layers that each sequence ran; 0 for ended sequences.

    Raises:
        ConfigError: for a model without a fast path.
    """
    reason = fast_path(model).why_not()
    if reason is not None:
        raise ConfigError(f"CALM can't decode with this model: {reason}")
    runner = _CalmRunner(
        model,
        weights or fast_path(model).usual_weights(),
        threshold,
        steps=max(0, generation_config.max_length - input_ids.shape[1] - 1),
        exits=exits if exits is not None else [],
        model_kwargs=model_kwargs,
    )
    request = DecodeRequest(
        model,
        input_ids,
        SkipSchedule.full_depth(len(decoder_layers(model))),
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus,
        streamer,
        model_kwargs,
    )
    return decode_loop(runner, request)


class _CalmRunner:
    """Decode steps in which each sequence exits at its own depth."""

    def __init__(
        self,
        model: GenerativeModel,
        weights: Weights,
        threshold: float,
        *,
        steps: int,
        exits: list[list[int]],
        model_kwargs: dict[str, Any],
    ) -> None:
        self._decoder = fast_path(model).decoder(weights)
        self._key_values = _key_values(model, self._decoder, weights)
        self._threshold = threshold
        self._steps = steps
        self._exits = exits
        self.cache = PlannedCache(SkipSchedule.full_depth(len(self._decoder.layers)), steps)
        self._mask = model_kwargs.get("attention_mask")

    def prefill(self, input_ids: Any) -> torch.Tensor:
        """Run the prompt [batch, positions] at full depth. Returns the last position's logits [batch, vocabulary]."""
        mask = torch.ones_like(input_ids) if self._mask is None else self._mask
        self._step_inputs = self._decoder.step_inputs(mask, self._steps)
        self._unended = list(range(len(input_ids)))  # unfinished rows, as indices into `_rows`
        self._rows = list(range(len(input_ids)))  # rows still computed, as indices into the batch
        self._batch = len(input_ids)
        return self._decoder.prefill(input_ids, range(len(self._decoder.layers)), self.cache, mask)

    def step(self, i: int, input_ids: Any) -> torch.Tensor:
        """Run generated token i, the last one of `input_ids` [rows, positions]. Returns logits [rows, vocabulary]."""
        tokens, inputs = input_ids[:, -1], self._step_inputs(i)
        hidden = self._decoder.embed(tokens, inputs)  # [rows, hidden]
        exits, row_logits = [0] * self._batch, {}
        waiting = self._unended  # rows that haven't exited; the hidden states of the others don't change
        for index, block in enumerate(self._decoder.layers):
            cached: Any = self.cache.layers[index]
            if not waiting:
                self._key_values[index](hidden, cached, inputs)
                continue
            deeper = block(hidden, cached, inputs)
            if len(waiting) == len(tokens):
                hidden = active = deeper
            else:
                rows = tokens.new_tensor(waiting)
                active = deeper[rows]  # [waiting, hidden]
                hidden = hidden.index_copy(0, rows, active)
            logits = self._decoder.logits(active)  # [waiting, vocabulary]
            last = index + 1 == len(self._decoder.layers)
            exit_now = [last or margin >= self._threshold for margin in margins(logits)]
            for at, row in enumerate(waiting):
                if exit_now[at]:
                    exits[self._rows[row]], row_logits[row] = index + 1, logits[at]
            waiting = [row for row, exited in zip(waiting, exit_now, strict=True) if not exited]
        self._exits.append(exits)
        zeros = torch.zeros_like(next(iter(row_logits.values())))  # for ended rows, which generate pads
        return torch.stack([row_logits.get(row, zeros) for row in range(len(tokens))])

    def choose(self, *_: Any) -> None:
        """Do nothing: exits are decided from hidden states."""

    def drop_ended_rows(self, unfinished: Sequence[int], *, may_leave: bool) -> list[int] | None:
        """Register ended rows, and drop them from the batch where that is allowed and faster."""
        rows = rows_to_keep(unfinished) if may_leave else None
        if rows is not None:
            self.cache.keep_rows(rows)
            self._step_inputs.keep_rows(rows)
            self._rows = [self._rows[row] for row in rows]
        self._unended = [place for place, row in enumerate(rows or range(len(unfinished))) if unfinished[row]]
        return rows


class KeyValues:
    """Writes the keys and values that a layer computes from a hidden state, without running the layer.

    Later tokens can then attend to a token that exited below the layer: the state propagation of early exits (Elbayad
    et al. 2020; CALM, arXiv 2207.07061). Families with a fused projection compute queries, keys and values.

    Args:
        layer, parts, make_linear: as in FastLayer.
        block: the FastLayer of the layer.
    """

    def __init__(
        self, layer: nn.Module, parts: BlockParts, block: FastLayer, make_linear: Callable[..., Linear]
    ) -> None:
        attention: Any = layer.get_submodule(parts.attention)
        projections = [getattr(attention, name) for name in parts.qkv[1:]]
        self._block = block
        self._project = project_together(projections, make_linear) if projections else block.qkv

    def __call__(self, hidden: torch.Tensor, cached: PlannedLayer, inputs: StepInputs) -> None:
        """Write the keys and values for `hidden` [batch, hidden], the layer's input."""
        block, batch = self._block, hidden.shape[0]
        projected = self._project(block.attention_norm(hidden) if block.norm_first else hidden)
        if block.interleaved:
            key, value = projected.view(batch, block.heads, 3, block.head_dim)[:, :, 1:].unbind(dim=2)
        else:
            key, value = projected.view(batch, -1, block.head_dim)[:, -2 * block.kv_heads :].chunk(2, dim=1)
        # each [batch, key/value heads, head_dim]
        if block.key_norm is not None:
            key = block.key_norm(key)
        if inputs.rotary is not None:
            key = rotate(key, *inputs.rotary)
        inputs.store(cached, key, value, None)


def margins(logits: torch.Tensor) -> list[float]:
    """The difference between the two largest probabilities of each row, from logits [rows, vocabulary]."""
    largest = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(2, dim=-1).values
    return [first - second for first, second in largest.tolist()]  # in Python: faster for so few numbers


def _key_values(model: GenerativeModel, decoder: FastDecoder, weights: Weights) -> list[KeyValues]:
    """The key/value projections of a decoder, created on first use."""
    if decoder not in _KEY_VALUES:
        parts = FAMILIES[model.config.model_type].parts
        assert parts is not None  # as the model has a fast path
        pairs = zip(decoder_layers(model), decoder.layers, strict=True)
        _KEY_VALUES[decoder] = [KeyValues(layer, parts, block, MAKERS[weights]) for layer, block in pairs]
    return _KEY_VALUES[decoder]
