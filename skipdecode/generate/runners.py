"""Runners: they compute the logits of the prompt and of each decode step for the decoding loop, with a cache."""

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
from skipdecode.fastpath.cpu_steps import ChosenTokens, DraftedRounds, DraftRule, RunningSequences
from skipdecode.fastpath.cuda_graphs import MAX_AHEAD, StepGraphs, keep_step_graphs, step_graphs
from skipdecode.fastpath.kv_cache import PlannedCache, sized_by
from skipdecode.fastpath.model import FastDecoder
from skipdecode.fastpath.row_compaction import rows_to_keep
from skipdecode.fastpath.step_inputs import PreparedInputs
from skipdecode.fastpath.verify_inputs import VerifyInputs
from skipdecode.gating import LayerGate, all_positions
from skipdecode.generate.decode_loop import GenerativeModel
from skipdecode.generate.fast_path import fast_path
from skipdecode.internals import arguments_of_next_step, attention_name, is_callers_cache
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.schedule import SkipSchedule


class _OfSchedule:
    """What runners under a schedule have in common."""

    def __init__(self, schedule: SkipSchedule, model_kwargs: dict[str, Any]) -> None:
        self._schedule = schedule
        self._kwargs = model_kwargs
        self._layers = {n: schedule.layers_for(n) for n in range(schedule.min_layers, schedule.max_layers + 1)}

    @property
    def cache(self) -> Any:
        """The cache that `generate` hands out as `past_key_values`."""
        return self._kwargs.get("past_key_values")

    def end(self) -> None:
        """Say that no step follows."""

    def _layers_ahead(self, i: int, room: Sequence[float]) -> list[tuple[int, ...]]:
        """Those of step i and of what may be chosen after it before anybody looks."""
        return [self._layers[self._schedule.budget(i + n)] for n in range(int(min(MAX_AHEAD, max(room))))]


class ForwardRunner(_OfSchedule):
    """Prefill and decode steps through the model's own forward pass, behind gates."""

    def __init__(
        self, model: GenerativeModel, gate: LayerGate, schedule: SkipSchedule, model_kwargs: dict[str, Any]
    ) -> None:
        super().__init__(schedule, model_kwargs)
        self._model = model
        self._gate = gate
        self._plans = {n: all_positions(schedule.num_layers, layers) for n, layers in self._layers.items()}

    def prefill(self, input_ids: Any) -> torch.Tensor:
        """Run the prompt [batch, columns] and fill the cache. Returns the last column's logits [batch, vocabulary]."""
        inputs = self._model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **self._kwargs)
        return self._run(inputs)

    def step(self, i: int, input_ids: Any) -> torch.Tensor:
        """Run generated token i, the last column of `input_ids`. Returns logits [batch, vocabulary]."""
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
        """None: a model's own forward pass gives logits alone."""
        return None

    def drop_ended_rows(self, unfinished: Sequence[int], *, may_leave: bool) -> list[int] | None:
        """None: a model's own forward pass runs every row until the last text has ended."""
        return None


class FastRunner(_OfSchedule):
    """Prefill and decode steps without the model's forward pass."""

    def __init__(
        self,
        schedule: SkipSchedule,
        model_kwargs: dict[str, Any],
        *,
        decoder: FastDecoder,
        attention_mask: torch.Tensor,
        step_inputs: PreparedInputs,
    ) -> None:
        super().__init__(schedule, model_kwargs)
        self._decoder = decoder
        self._mask = attention_mask
        self._step_inputs = step_inputs

    def prefill(self, input_ids: Any) -> torch.Tensor:
        embeds, positions = (self._kwargs.get(name) for name in ("inputs_embeds", "position_ids"))
        prompt = input_ids if embeds is None else embeds
        layers, stop = self._schedule.prompt_layers, self._schedule.prompt_stop
        return self._decoder.prefill(prompt, layers, self.cache, self._mask, positions, stop=stop)

    def step(self, i: int, input_ids: Any) -> torch.Tensor:
        layers = self._layers[self._schedule.budget(i)]
        return self._decoder(input_ids[:, -1], layers, self.cache, self._step_inputs(i))

    def choose(
        self, i: int, input_ids: Any, room: Sequence[float], ends: Collection[int], padding: Any
    ) -> torch.Tensor | None:
        native = self._decoder.choosing(len(room))
        if native is None:
            return None
        layers = self._layers_ahead(i, room)
        most = [int(min(len(layers), each)) for each in room]
        texts = RunningSequences(input_ids[:, -1], range(len(most)), [i] * len(most), most, ends)
        found = native.choose(texts, layers, self.cache, self._step_inputs)
        if padding is not None:
            for row, count in enumerate(found.counts):
                found.tokens[row, count:] = padding
        return found.tokens

    def drop_ended_rows(self, unfinished: Sequence[int], *, may_leave: bool) -> list[int] | None:
        rows = rows_to_keep(unfinished) if may_leave else None
        if rows is not None:
            self.cache.keep_rows(rows)
            self._step_inputs.keep_rows(rows)
        return rows


class GraphRunner(FastRunner):
    """Steps of the fast path on buffers that stay, as CUDA graphs where there is a GPU."""

    def __init__(self, *args: Any, graphs: StepGraphs, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._graphs = graphs

    def prefill(self, input_ids: Any) -> torch.Tensor:
        logits = super().prefill(input_ids)
        self._graphs.start(self._step_inputs, logits)
        return logits

    def step(self, i: int, input_ids: Any) -> torch.Tensor:
        layers = self._layers[self._schedule.budget(i)]
        return self._graphs.run(i, input_ids[:, -1], layers)

    def choose(
        self, i: int, input_ids: Any, room: Sequence[float], ends: Collection[int], padding: Any
    ) -> torch.Tensor | None:
        layers = self._layers_ahead(i, room)
        return self._graphs.choose(i, input_ids[:, -1], layers, room, ends, padding)

    def drop_ended_rows(self, unfinished: Sequence[int], *, may_leave: bool) -> list[int] | None:
        # There is a graph for each number of rows.
        rows = rows_to_keep(unfinished, powers_of_two=True) if may_leave else None
        if rows is not None:
            self._step_inputs.keep_rows(rows)
            self._graphs.keep_rows(rows, self._step_inputs)
        return rows

    def end(self) -> None:
        keep_step_graphs(self._decoder, self._graphs)


def make_runner(
    model: GenerativeModel,
    gated: Callable[[], LayerGate],
    schedule: SkipSchedule,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    synced_gpus: bool,
    weights: Weights | None,
    cuda_graphs: bool | None,
    model_kwargs: dict[str, Any],
    no_fast_path: str | None,
) -> ForwardRunner | FastRunner:
    """The fastest runner that does what a call asks for, with its cache; `no_fast_path` is what `FastPath.why_not`
    says. Layers are `gated` where the model's own forward pass runs them.

    Raises ConfigError for copied weights and for graphs where the call has no fast path, and for graphs with a sliding
    window.
    """
    reason = _why_another_cache(unwrap(model), generation_config, model_kwargs)
    if reason is None:
        reason = _why_a_forward_pass(no_fast_path, synced_gpus, model_kwargs)
        steps = max(0, generation_config.max_length - input_ids.shape[1] - 1)
        model_kwargs = {**model_kwargs, "past_key_values": PlannedCache(schedule, steps)}
    if reason is not None:
        if weights not in (None, "model"):
            raise ConfigError(f"weights is {weights!r}, which this model can't decode with: {reason}")
        if cuda_graphs:
            raise ConfigError(f"cuda_graphs is True, which this model can't decode with: {reason}")
        return ForwardRunner(model, gated(), schedule, model_kwargs)
    decoder = fast_path(model).decoder(weights, looked=True)  # `no_fast_path` says so
    mask = _prompt_mask(input_ids, model_kwargs)
    step_inputs = decoder.step_inputs(mask, steps, model_kwargs.get("position_ids"))
    fast: Any = {"decoder": decoder, "attention_mask": mask, "step_inputs": step_inputs}
    if decoder.windowed and cuda_graphs:
        raise ConfigError("cuda_graphs is True: steps of attention with a sliding window have no CUDA graphs")
    if decoder.windowed or not (input_ids.device.type == "cuda" if cuda_graphs is None else cuda_graphs):
        return FastRunner(schedule, model_kwargs, **fast)
    shape = (*mask.shape, bool(mask.all()))  # rows of one length share their positions
    graphs = step_graphs(decoder, schedule, steps, shape, keep=not generation_config.return_dict_in_generate)
    model_kwargs["past_key_values"] = graphs.cache
    return GraphRunner(schedule, model_kwargs, **fast, graphs=graphs)


class ColumnsRunner:
    """Passes of the fast path with several tokens of each row, each row at its own slots, on a cache of full depth.

    A pass writes its columns over what they held, and leaves those behind them to be written again.

    Args:
        decoder: of the model.
        input_ids: the prompt [batch, columns].
        steps: generated tokens at most that are an input.
        model_kwargs: as generate gives them; the mask, positions and embeddings of the prompt are read.
    """

    def __init__(self, decoder: FastDecoder, input_ids: torch.Tensor, steps: int, model_kwargs: dict[str, Any]) -> None:
        self.decoder = self._drafter = decoder
        self._mask = _prompt_mask(input_ids, model_kwargs)
        self._positions, self._embeds = model_kwargs.get("position_ids"), model_kwargs.get("inputs_embeds")
        self._step_inputs = decoder.step_inputs(self._mask, steps, self._positions)
        self.all_layers = tuple(range(len(decoder.layers)))
        # With room for a prompt the buffers hold zeros: rows attend, at weight 0, to columns that only others have.
        rows, columns = self._mask.shape
        self.cache = PlannedCache(_full_depth(len(decoder.layers)), steps, prompt_columns=columns if rows > 1 else 0)

    def draft_with(self, decoder: FastDecoder) -> None:
        """Run what needn't be exact by another decoder of the same model."""
        self._drafter = decoder

    def prefill(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Run the prompt [batch, columns]. Returns the last column's logits [batch, vocabulary]."""
        prompt = input_ids if self._embeds is None else self._embeds
        return self.decoder.prefill(prompt, self.all_layers, self.cache, self._mask, self._positions)

    def run(
        self,
        tokens: torch.Tensor,
        starts: Sequence[int],
        counts: Sequence[int],
        layers: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run tokens of each row, one row's after another's.

        Args:
            tokens: [tokens].
            starts, counts: for each row the number of its first one among its generated tokens, and how many there are.
            layers: of drafts, ascending; each must hold all columns before. None for all of the model's, exactly.

        Returns:
            Logits [tokens, vocabulary].
        """
        if set(counts) == {1} and len(set(starts)) == 1:
            inputs = self._step_inputs(starts[0])
        else:
            inputs = VerifyInputs(self._step_inputs, starts, counts, tokens.device)
        if layers is None:
            return self.decoder(tokens, self.all_layers, self.cache, inputs)
        return self._drafter(tokens, layers, self.cache, inputs)

    def choose(self, texts: RunningSequences, steps: int) -> ChosenTokens | None:
        """Choose so many tokens of each text by all layers, as `NativeSteps.choose`; None where that can't be."""
        native = self.decoder.choosing(len(texts.tokens))
        if native is None:
            return None
        return native.choose(texts, [self.all_layers] * steps, self.cache, self._step_inputs)

    def draft(
        self, texts: RunningSequences, layers: Sequence[Sequence[int]], rule: DraftRule, rounds: int
    ) -> DraftedRounds | None:
        """Rounds of drafts, verified by all layers, as `NativeSteps.draft`; None where that can't be."""
        native = self.decoder.choosing(len(texts.tokens) * (1 + len(layers)))
        drafter = self._drafter.choosing(len(texts.tokens))
        if native is None or drafter is None:
            return None
        return native.draft(texts, layers, self.all_layers, self.cache, self._step_inputs, rule, rounds, drafter)

    def roll_back(self, steps: int) -> None:
        """Hold the columns of the prompt and of so many generated tokens alone."""
        self.cache.roll_back(self._mask.shape[1] + steps)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Run `rows` alone from now on, in their order."""
        self.cache.keep_rows(rows)
        self._step_inputs.keep_rows(rows)


@functools.cache
def _full_depth(num_layers: int) -> SkipSchedule:
    return SkipSchedule.full_depth(num_layers, horizon=1)


def make_columns_runner(
    model: GenerativeModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    generation_config: GenerationConfig,
    synced_gpus: bool,
    weights: Weights | None,
    cuda_graphs: bool | None,
    model_kwargs: dict[str, Any],
    no_fast_path: str | None,
) -> ColumnsRunner:
    """The runner of lossless decoding. Raises ConfigError for what it can't do, with the reason."""
    reason = _why_another_cache(unwrap(model), generation_config, model_kwargs)
    reason = reason or _why_a_forward_pass(no_fast_path, synced_gpus, model_kwargs)
    reason = reason or _why_not_called_again(logits_processor)
    if reason is not None:
        raise ConfigError(f"lossless is True, and this call can't draft and verify: {reason}")
    if cuda_graphs:
        raise ConfigError("cuda_graphs is True: lossless decoding has no CUDA graphs; leave one of the two out")
    steps = max(0, generation_config.max_length - input_ids.shape[1] - 1)
    return ColumnsRunner(fast_path(model).decoder(weights, looked=True), input_ids, steps, model_kwargs)


def _why_not_called_again(processors: LogitsProcessorList) -> str | None:
    """The reason why logits processors can't be called more than once a token; None where they can."""
    for kind, what in _REMEMBERING.items():
        if any(isinstance(processor, kind) for processor in processors):
            return f"{what} is asked for, whose logits processor keeps what it was called with"
    return None


_REMEMBERING = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale",
    SynthIDTextWatermarkLogitsProcessor: "a SynthID watermark",
}


def why_no_fast_path(
    model: GenerativeModel, generation_config: GenerationConfig, synced_gpus: bool, model_kwargs: dict[str, Any]
) -> str | None:
    """The reason why a call has no fast path, on a cache of the runner's own; None where it has."""
    reason = _why_another_cache(unwrap(model), generation_config, model_kwargs)
    return reason or _why_a_forward_pass(fast_path(model).why_not(), synced_gpus, model_kwargs)


def _why_another_cache(
    inner: GenerativeModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> str | None:
    """The reason why a call's cache can't be a planned one; None where it can."""
    kinds = set(getattr(text_config(inner.config), "layer_types", None) or ())
    if is_callers_cache(model_kwargs.get("past_key_values")) or generation_config.cache_implementation is not None:
        return "a cache was given"
    if kinds - {"full_attention", "sliding_attention"}:
        return f"its layers are of the kinds {', '.join(sorted(kinds))}"  # some hold more than keys and values
    if attention_name(inner.config) not in ALL_MASK_ATTENTION_FUNCTIONS:
        # Without a mask, what it doesn't attend to is what its own cache has dropped.
        return f"its attention {attention_name(inner.config)!r} takes no mask"
    return None


def _why_a_forward_pass(no_fast_path: str | None, synced_gpus: bool, model_kwargs: dict[str, Any]) -> str | None:
    """The reason why steps on a planned cache must go through the model's own forward pass; None where they needn't."""
    shared = "several processes share it" if synced_gpus else None
    return shared or _more_than_a_token(model_kwargs) or no_fast_path


def _prompt_mask(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
    """The attention mask of a prompt [batch, columns]; generate drops one that hides nothing.

    Raises ConfigError for one that is as wide as no prompt.
    """
    mask: torch.Tensor | None = model_kwargs.get("attention_mask")
    columns = prompt_columns(input_ids, model_kwargs)
    if mask is None:
        return input_ids.new_ones(len(input_ids), columns)
    if mask.shape[1] != columns:
        raise ConfigError(f"attention_mask has {mask.shape[1]} columns, and the prompt {columns}")
    return mask.long() if mask.dtype == torch.uint8 else mask  # whose sums and negations wrap around


# Arguments of generate that the fast path obeys, or may ignore because they concern the prompt or the cache.
_UNDERSTOOD = {
    "attention_mask",
    "inputs_embeds",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "position_ids",
    "use_cache",
}


def _more_than_a_token(model_kwargs: dict[str, Any]) -> str | None:
    """The reason why a call's steps need the model's own forward pass; None for tokens, positions and a mask alone."""
    for name, value in model_kwargs.items():
        if value is not None and name not in _UNDERSTOOD:
            return f"{name} was given"
    for name in ("attention_mask", "position_ids"):
        value = model_kwargs.get(name)
        if value is not None and value.dim() != 2:
            return f"{name} has {value.dim()} dimensions"
    return None


def prompt_columns(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> int:
    """Columns that the prompt fills in the cache."""
    embeds = model_kwargs.get("inputs_embeds")
    return int(input_ids.shape[1] if embeds is None else embeds.shape[1])
