"""Runners: they compute the logits of the prompts and of each decode step for a decoding loop, and own the cache."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from skipdecode.errors import ConfigError
from skipdecode.families import text_config, unwrap
from skipdecode.fastpath.cuda_graphs import MAX_AHEAD, keep_step_graphs, step_graphs
from skipdecode.fastpath.kv_cache import PlannedCache, sized_by
from skipdecode.fastpath.model import FastDecoder
from skipdecode.fastpath.prompt_graphs import MAX_PROMPT_TOKENS, PROMPT_GRAIN, pad_to_multiple
from skipdecode.fastpath.row_compaction import rows_to_keep
from skipdecode.fastpath.sequences import ChosenTokens, DraftedRounds, DraftRule, RunningSequences
from skipdecode.fastpath.verify_inputs import VerifyInputs
from skipdecode.gating import LayerGate, all_positions
from skipdecode.generate.fast_path import fast_path
from skipdecode.generate.request import DecodeRequest, GenerativeModel
from skipdecode.internals import arguments_of_next_step, attention_name, is_callers_cache
from skipdecode.schedule.schedule import SkipSchedule


class _ScheduledRunner:
    """The common part of runners under a schedule."""

    def __init__(self, request: DecodeRequest) -> None:
        self._schedule = schedule = request.schedule
        self._kwargs = request.model_kwargs
        self._layers = {n: schedule.layers_for(n) for n in range(schedule.min_layers, schedule.max_layers + 1)}

    @property
    def cache(self) -> Any:
        """The cache that `generate` returns as `past_key_values`."""
        return self._kwargs.get("past_key_values")

    def end(self) -> None:
        """Release what the steps needed; none follows."""

    def _next_layers(self, i: int, room: Sequence[float]) -> list[tuple[int, ...]]:
        """The layers of step i and of those that may follow it in the same call."""
        return [self._layers[self._schedule.budget(i + n)] for n in range(int(min(MAX_AHEAD, max(room))))]


class ForwardRunner(_ScheduledRunner):
    """Prefill and decode steps by the model's own forward pass, with gates around its layers."""

    def __init__(self, request: DecodeRequest, gate: LayerGate) -> None:
        super().__init__(request)
        self._model = request.model
        self._gate = gate
        num_layers = self._schedule.num_layers
        self._plans = {n: all_positions(num_layers, layers) for n, layers in self._layers.items()}

    def prefill(self, input_ids: Any) -> torch.Tensor:
        """Run the prompts and fill the cache. Returns the last position's logits [batch, vocabulary]."""
        inputs = self._model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **self._kwargs)
        return self._run(inputs)

    def step(self, i: int, input_ids: Any) -> torch.Tensor:
        """Run generated token i, the last one of `input_ids`. Returns logits [batch, vocabulary]."""
        budget = self._schedule.budget(i)
        self._gate.plan, self._gate.stopped = self._plans[budget], None
        with sized_by(self.cache, self._layers[budget]):
            inputs = self._model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **self._kwargs)
            return self._run(inputs)

    def _run(self, inputs: Any) -> torch.Tensor:
        with self._gate.active():
            outputs = self._model(**inputs, return_dict=True)
        self._kwargs = arguments_of_next_step(self._model, outputs, self._kwargs)
        logits: torch.Tensor = outputs.logits[:, -1]
        return logits

    def choose(
        self, i: int, input_ids: Any, room: Sequence[float], ends: Collection[int], padding: Any
    ) -> torch.Tensor | None:
        """Return None: a model's forward pass gives logits only."""
        return None

    def drop_ended_rows(self, unfinished: Sequence[int], *, may_leave: bool) -> list[int] | None:
        """Return None: a model's forward pass runs every sequence until the last one has ended."""
        return None


class FastRunner(_ScheduledRunner):
    """Prefill and decode steps by the fast path, without the model's forward pass."""

    def __init__(self, request: DecodeRequest, decoder: FastDecoder, grain: int = 1) -> None:
        """Prompts are padded to a multiple of `grain`."""
        super().__init__(request)
        self._decoder = decoder
        self._mask = pad_to_multiple(request.prompt_mask, grain)
        positions = self._kwargs.get("position_ids")
        self._positions = None if positions is None else pad_to_multiple(positions, grain)
        self._step_inputs = decoder.step_inputs(self._mask, request.max_steps, self._positions)

    def prefill(self, input_ids: Any) -> torch.Tensor:
        embeds = self._kwargs.get("inputs_embeds")
        prompt = input_ids if embeds is None else embeds
        layers, stop = self._schedule.prompt_layers, self._schedule.prompt_stop
        return self._decoder.prefill(prompt, layers, self.cache, self._mask, self._positions, stop=stop)

    def step(self, i: int, input_ids: Any) -> torch.Tensor:
        layers = self._layers[self._schedule.budget(i)]
        return self._decoder(input_ids[:, -1], layers, self.cache, self._step_inputs(i))

    def choose(
        self, i: int, input_ids: Any, room: Sequence[float], ends: Collection[int], padding: Any
    ) -> torch.Tensor | None:
        native = self._decoder.choosing(len(room))
        if native is None:
            return None
        layers = self._next_layers(i, room)
        max_new = [int(min(len(layers), each)) for each in room]
        sequences = RunningSequences(input_ids[:, -1], range(len(max_new)), [i] * len(max_new), max_new, ends)
        chosen = native.choose(sequences, layers, self.cache, self._step_inputs)
        if padding is not None:
            for row, count in enumerate(chosen.counts):
                chosen.tokens[row, count:] = padding
        return chosen.tokens

    def drop_ended_rows(self, unfinished: Sequence[int], *, may_leave: bool) -> list[int] | None:
        rows = rows_to_keep(unfinished) if may_leave else None
        if rows is not None:
            self.cache.keep_rows(rows)
            self._step_inputs.keep_rows(rows)
        return rows


class GraphRunner(FastRunner):
    """Fast-path steps on fixed buffers, replayed as CUDA graphs if there is a GPU; short prompts too, on request."""

    def __init__(self, request: DecodeRequest, decoder: FastDecoder) -> None:
        # The caller's cache has a slot for each position of the caller's prompt.
        keep = not request.generation_config.return_dict_in_generate
        no_embeds = request.model_kwargs.get("inputs_embeds") is None
        padded = pad_to_multiple(request.prompt_mask, PROMPT_GRAIN)
        self._prompt_graph = bool(request.cuda_graphs) and keep and no_embeds and padded.numel() <= MAX_PROMPT_TOKENS
        super().__init__(request, decoder, PROMPT_GRAIN if self._prompt_graph else 1)
        shape = (*self._mask.shape, bool(self._mask.all()))  # unpadded prompts share their positions
        self._graphs = step_graphs(decoder, self._schedule, request.max_steps, shape, keep=keep)
        self._kwargs = {**self._kwargs, "past_key_values": self._graphs.cache}

    def prefill(self, input_ids: Any) -> torch.Tensor:
        if self._prompt_graph:
            tokens = pad_to_multiple(input_ids, PROMPT_GRAIN)
            logits = self._graphs.prefill(tokens, self._mask, self._positions)
        else:
            logits = super().prefill(input_ids)
        self._graphs.start(self._step_inputs, logits)
        return logits

    def step(self, i: int, input_ids: Any) -> torch.Tensor:
        layers = self._layers[self._schedule.budget(i)]
        return self._graphs.run(i, input_ids[:, -1], layers)

    def choose(
        self, i: int, input_ids: Any, room: Sequence[float], ends: Collection[int], padding: Any
    ) -> torch.Tensor | None:
        return self._graphs.choose(i, input_ids[:, -1], self._next_layers(i, room), room, ends, padding)

    def drop_ended_rows(self, unfinished: Sequence[int], *, may_leave: bool) -> list[int] | None:
        # Each number of sequences has a graph of its own.
        rows = rows_to_keep(unfinished, powers_of_two=True) if may_leave else None
        if rows is not None:
            self._step_inputs.keep_rows(rows)
            self._graphs.keep_rows(rows, self._step_inputs)
        return rows

    def end(self) -> None:
        keep_step_graphs(self._decoder, self._graphs)


def make_runner(
    request: DecodeRequest, fast_path_obstacle: str | None, gate: Callable[[], LayerGate]
) -> ForwardRunner | FastRunner:
    """The fastest runner for a request, with a cache.

    Args:
        fast_path_obstacle: what `FastPath.why_not` returns for the model.
        gate: gates the model's layers; it is called if the model's own forward pass runs them.

    Raises:
        ConfigError: for weights that are copies and for CUDA graphs, if the model's forward pass must run; for CUDA
            graphs also if the attention has a sliding window.
    """
    reason = _cache_obstacle(request.model, request.generation_config, request.model_kwargs)
    if reason is None:
        reason = _forward_pass_reason(fast_path_obstacle, request.synced_gpus, request.model_kwargs)
        request = request.with_cache(PlannedCache(request.schedule, request.max_steps))
    if reason is not None:
        if request.weights not in (None, "model"):
            raise ConfigError(f"weights is {request.weights!r}, which this model can't decode with: {reason}")
        if request.cuda_graphs:
            raise ConfigError(f"cuda_graphs is True, which this model can't decode with: {reason}")
        return ForwardRunner(request, gate())
    decoder = fast_path(request.model).decoder(request.weights, looked=True)  # the obstacle was just looked for
    if decoder.windowed and request.cuda_graphs:
        raise ConfigError("cuda_graphs is True: CUDA graphs aren't available for attention with a sliding window")
    graphs = request.input_ids.device.type == "cuda" if request.cuda_graphs is None else request.cuda_graphs
    return GraphRunner(request, decoder) if graphs and not decoder.windowed else FastRunner(request, decoder)


class LosslessRunner:
    """Fast-path passes over several tokens of each sequence, each at a position of its own, on a full-depth cache.

    A pass overwrites the keys and values at its positions; those after them may be written again.

    Args:
        max_steps: maximum number of generated tokens that are an input.
        mask: attention mask of the prompts, [batch, prompt length].
        model_kwargs: as `generate` passes them; the prompts' positions and embeddings are read.
    """

    def __init__(
        self, decoder: FastDecoder, max_steps: int, mask: torch.Tensor, model_kwargs: dict[str, Any] | None = None
    ) -> None:
        self.decoder = self._drafter = decoder
        self._mask = mask
        inputs = model_kwargs or {}
        self._positions, self._embeds = inputs.get("position_ids"), inputs.get("inputs_embeds")
        self._step_inputs = decoder.step_inputs(mask, max_steps, self._positions)
        self.all_layers = tuple(range(len(decoder.layers)))
        # Room for the prompt zeroes the buffers: sequences attend, with weight 0, to slots that only others have.
        rows, length = mask.shape
        full_depth = _full_depth(len(decoder.layers))
        self.cache = PlannedCache(full_depth, max_steps, prompt_columns=length if rows > 1 else 0)

    def draft_with(self, decoder: FastDecoder) -> None:
        """Run the drafts by another decoder of the same model, which may be less exact."""
        self._drafter = decoder

    def prefill(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Run the prompts. Returns the last position's logits [batch, vocabulary]."""
        prompt = input_ids if self._embeds is None else self._embeds
        return self.decoder.prefill(prompt, self.all_layers, self.cache, self._mask, self._positions)

    def run(
        self,
        tokens: torch.Tensor,
        starts: Sequence[int],
        counts: Sequence[int],
        layers: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run tokens [tokens], one sequence's after another's. Returns logits [tokens, vocabulary].

        Args:
            starts: for each sequence, the index of its first token among its generated ones.
            counts: for each sequence, the number of its tokens.
            layers: that drafts run, ascending; each must hold all positions before. None for a pass at full depth.
        """
        if set(counts) == {1} and len(set(starts)) == 1:
            inputs = self._step_inputs(starts[0])
        else:
            inputs = VerifyInputs(self._step_inputs, starts, counts, tokens.device)
        if layers is None:
            return self.decoder(tokens, self.all_layers, self.cache, inputs)
        return self._drafter(tokens, layers, self.cache, inputs)

    def choose(self, sequences: RunningSequences, steps: int) -> ChosenTokens | None:
        """Decode `steps` tokens of each sequence at full depth by the kernels; None if these can't."""
        native = self.decoder.choosing(len(sequences.tokens))
        if native is None:
            return None
        return native.choose(sequences, [self.all_layers] * steps, self.cache, self._step_inputs)

    def draft(
        self, sequences: RunningSequences, layers: Sequence[Sequence[int]], rule: DraftRule, rounds: int
    ) -> DraftedRounds | None:
        """Draft and verify by the kernels, `rounds` times (`NativeSteps.draft`); None if these can't."""
        native = self.decoder.choosing(len(sequences.tokens) * (1 + len(layers)))
        drafter = self._drafter.choosing(len(sequences.tokens))
        if native is None or drafter is None:
            return None
        return native.draft(sequences, layers, self.all_layers, self.cache, self._step_inputs, rule, rounds, drafter)

    def roll_back(self, steps: int) -> None:
        """Keep the keys and values of the prompts and of `steps` generated tokens only."""
        self.cache.roll_back(self._mask.shape[1] + steps)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Run the sequences with these indices only from now on, in their order."""
        self.cache.keep_rows(rows)
        self._step_inputs.keep_rows(rows)


@functools.cache
def _full_depth(num_layers: int) -> SkipSchedule:
    return SkipSchedule.full_depth(num_layers, horizon=1)


def make_lossless_runner(request: DecodeRequest, fast_path_obstacle: str | None) -> LosslessRunner:
    """The runner of lossless decoding. Raises ConfigError for a request that it can't decode, with the reason."""
    reason = _cache_obstacle(request.model, request.generation_config, request.model_kwargs)
    reason = reason or _forward_pass_reason(fast_path_obstacle, request.synced_gpus, request.model_kwargs)
    reason = reason or _stateful_processor(request.logits_processor)
    if reason is not None:
        raise ConfigError(f"lossless is True, and this call can't draft and verify: {reason}")
    if request.cuda_graphs:
        raise ConfigError("cuda_graphs is True: lossless decoding has no CUDA graphs; leave one of the two out")
    decoder = fast_path(request.model).decoder(request.weights, looked=True)
    return LosslessRunner(decoder, request.max_steps, request.prompt_mask, request.model_kwargs)


def _stateful_processor(processors: LogitsProcessorList) -> str | None:
    """The reason why logits processors can't be called more than once per token; None if they can."""
    for kind, setting in _STATEFUL_PROCESSORS.items():
        if any(isinstance(processor, kind) for processor in processors):
            return f"the logits processor of {setting} keeps state between its calls"
    return None


_STATEFUL_PROCESSORS = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale",
    SynthIDTextWatermarkLogitsProcessor: "a SynthID watermark",
}


def why_no_fast_path(
    model: GenerativeModel, generation_config: GenerationConfig, synced_gpus: bool, model_kwargs: dict[str, Any]
) -> str | None:
    """The reason why a call can't decode by the fast path with a cache of its own; None if it can."""
    reason = _cache_obstacle(model, generation_config, model_kwargs)
    return reason or _forward_pass_reason(fast_path(model).why_not(), synced_gpus, model_kwargs)


def _cache_obstacle(
    model: GenerativeModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> str | None:
    """The reason why a call can't use a PlannedCache; None if it can."""
    config = unwrap(model).config
    kinds = set(getattr(text_config(config), "layer_types", None) or ())
    if is_callers_cache(model_kwargs.get("past_key_values")) or generation_config.cache_implementation is not None:
        return "a cache was given"
    if kinds - {"full_attention", "sliding_attention"}:
        return f"its layers are of the kinds {', '.join(sorted(kinds))}"  # some hold more than keys and values
    if attention_name(config) not in ALL_MASK_ATTENTION_FUNCTIONS:
        # Without a mask, only its own cache keeps it from attending to slots out of its reach.
        return f"its attention {attention_name(config)!r} takes no mask"
    return None


def _forward_pass_reason(fast_path_obstacle: str | None, synced_gpus: bool, model_kwargs: dict[str, Any]) -> str | None:
    """The reason why steps on a PlannedCache need the model's own forward pass; None if they don't."""
    shared = "several processes share it" if synced_gpus else None
    return shared or _unsupported_argument(model_kwargs) or fast_path_obstacle


# Arguments of generate that the fast path obeys, or may ignore because they concern the prompt or the cache.
_SUPPORTED_ARGUMENTS = {
    "attention_mask",
    "inputs_embeds",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "position_ids",
    "use_cache",
}


def _unsupported_argument(model_kwargs: dict[str, Any]) -> str | None:
    """The argument that needs the model's own forward pass, as a reason; None if there is none."""
    for name, value in model_kwargs.items():
        if value is not None and name not in _SUPPORTED_ARGUMENTS:
            return f"{name} was given"
    for name in ("attention_mask", "position_ids"):
        value = model_kwargs.get(name)
        if value is not None and value.dim() != 2:
            return f"{name} has {value.dim()} dimensions"
    return None
