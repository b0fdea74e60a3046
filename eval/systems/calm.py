"""CALM-DEC, a rival: each token leaves the model at the first layer whose prediction is confident enough.

Confident Adaptive Language Modeling (Schuster et al. 2022, arXiv 2207.07061), adapted to models without an encoder as
in SkipDecode's baseline: the confidence is the difference of the two largest probabilities that the model's own norm
and head give a layer's output, and a token leaves where it reaches a threshold. The layers above get their keys and
values from the state that it left with (state propagation). The prompt runs at full depth. The paper lets the threshold
decay over time too; here it is constant.

How deep a row goes depends on that row alone, so in a batch every row waits for the last: the others stand still, and
their layers run for nothing.
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
from skipdecode.fastpath.layer import LeanBlock, StepInputs, rotate
from skipdecode.fastpath.model import LeanDecoder
from skipdecode.fastpath.row_compaction import rows_to_keep
from skipdecode.generate.decode_loop import decode_loop
from skipdecode.generate.fast_path import fast_path
from skipdecode.generate.request import DecodeRequest, GenerativeModel
from skipdecode.kernels.linear import MAKERS, Linear, Weights, project_together
from skipdecode.timing.step_clock import generate_timed

# decoder -> what writes the keys and values of each of its layers, which holds copies of weights
_KEY_VALUES: weakref.WeakKeyDictionary[LeanDecoder, list["KeyValues"]] = weakref.WeakKeyDictionary()


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
        return SkipSchedule.full_depth(self.checkpoint.num_layers)  # every layer holds every token

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
        exits: gets a list for each decode step: how many layers each row's token ran; 0 for rows that were done.

    Raises:
        ConfigError: for a model whose decode steps can't be lean.
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
    """Decode steps in which each row goes as deep as it needs."""

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
        self.cache = PlannedCache(SkipSchedule.full_depth(len(self._decoder.blocks)), steps)
        self._mask = model_kwargs.get("attention_mask")

    def prefill(self, input_ids: Any) -> torch.Tensor:
        """Run the prompt [batch, columns] at full depth. Returns the last column's logits [batch, vocabulary]."""
        mask = torch.ones_like(input_ids) if self._mask is None else self._mask
        self._step_inputs = self._decoder.step_inputs(mask, self._steps)
        self._unended = list(range(len(input_ids)))  # rows whose text goes on, among those that run
        self._rows = list(range(len(input_ids)))  # those that run, by their places in the batch
        self._batch = len(input_ids)
        return self._decoder.prefill(input_ids, range(len(self._decoder.blocks)), self.cache, mask)

    def step(self, i: int, input_ids: Any) -> torch.Tensor:
        """Run generated token i, the last column of `input_ids` [rows, columns]. Returns logits [rows, vocabulary]."""
        tokens, inputs = input_ids[:, -1], self._step_inputs(i)
        hidden = self._decoder.embed(tokens, inputs)  # [rows, hidden]
        exits, answers = [0] * self._batch, {}
        waiting = self._unended  # rows that go deeper; the states of the others stay as they are
        for index, block in enumerate(self._decoder.blocks):
            cached: Any = self.cache.layers[index]
            if not waiting:
                self._key_values[index](hidden, cached, inputs)
                continue
            deeper = block(hidden, cached, inputs)
            if len(waiting) == len(tokens):
                hidden = asked = deeper
            else:
                rows = tokens.new_tensor(waiting)
                asked = deeper[rows]  # [waiting, hidden]
                hidden = hidden.index_copy(0, rows, asked)
            logits = self._decoder.logits(asked)  # [waiting, vocabulary]
            last = index + 1 == len(self._decoder.blocks)
            leaves = [last or margin >= self._threshold for margin in margins(logits)]
            for at, row in enumerate(waiting):
                if leaves[at]:
                    exits[self._rows[row]], answers[row] = index + 1, logits[at]
            waiting = [row for row, left in zip(waiting, leaves, strict=True) if not left]
        self._exits.append(exits)
        nothing = torch.zeros_like(next(iter(answers.values())))  # for rows that have ended: generate pads them
        return torch.stack([answers.get(row, nothing) for row in range(len(tokens))])

    def choose(self, *_: Any) -> None:
        """None: how deep a token goes is known from its hidden states."""

    def drop_ended_rows(self, unfinished: Sequence[int], *, may_leave: bool) -> list[int] | None:
        """Take note of rows whose texts have ended, and let them leave where they may and that pays."""
        rows = rows_to_keep(unfinished) if may_leave else None
        if rows is not None:
            self.cache.keep_rows(rows)
            self._step_inputs.keep_rows(rows)
            self._rows = [self._rows[row] for row in rows]
        self._unended = [place for place, row in enumerate(rows or range(len(unfinished))) if unfinished[row]]
        return rows


class KeyValues:
    """Writes the keys and values that a layer makes of a hidden state, without running the layer.

    So a token that left the model below the layer is there for later tokens to attend to: the state propagation of
    early exits (Elbayad et al. 2020; CALM, arXiv 2207.07061). A family whose projection gives queries,
    keys and values at once computes all three.

    Args:
        layer, parts, make_linear: as in LeanBlock.
        block: the layer's.
    """

    def __init__(
        self, layer: nn.Module, parts: BlockParts, block: LeanBlock, make_linear: Callable[..., Linear]
    ) -> None:
        attention: Any = layer.get_submodule(parts.attention)
        projections = [getattr(attention, name) for name in parts.qkv[1:]]
        self._block = block
        self._project = project_together(projections, make_linear) if projections else block.qkv

    def __call__(self, hidden: torch.Tensor, cached: PlannedLayer, inputs: StepInputs) -> None:
        """Write those of `hidden` [batch, hidden], the layer's input."""
        block, batch = self._block, hidden.shape[0]
        projected = self._project(block.attention_norm(hidden) if block.norm_first else hidden)
        if block.interleaved:
            key, value = projected.view(batch, block.heads, 3, block.head_dim)[:, :, 1:].unbind(dim=2)
        else:
            key, value = projected.view(batch, -1, block.head_dim)[:, -2 * block.kv_heads :].chunk(2, dim=1)
        # each [batch, heads that have keys, head_dim]
        if block.key_norm is not None:
            key = block.key_norm(key)
        if inputs.rotary is not None:
            key = rotate(key, *inputs.rotary)
        inputs.update_cache(cached, key, value, None)


def margins(logits: torch.Tensor) -> list[float]:
    """Probability of each row's likeliest token less that of the next, from logits [rows, vocabulary]."""
    likeliest = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(2, dim=-1).values
    return [first - second for first, second in likeliest.tolist()]  # few numbers: each operation of torch costs more


def _key_values(model: GenerativeModel, decoder: LeanDecoder, weights: Weights) -> list[KeyValues]:
    """Made when they are first asked for, as the decoder itself."""
    if decoder not in _KEY_VALUES:
        parts = FAMILIES[model.config.model_type].parts
        assert parts is not None  # as the model has a lean decoder
        pairs = zip(decoder_layers(model), decoder.blocks, strict=True)
        _KEY_VALUES[decoder] = [KeyValues(layer, parts, block, MAKERS[weights]) for layer, block in pairs]
    return _KEY_VALUES[decoder]
