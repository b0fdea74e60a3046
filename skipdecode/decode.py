"""Decoding under a schedule: prefill and steps, behind `model.generate(custom_generate=skip_generate)`."""

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.utils import logging

from skipdecode.attach import LayerGate, check_schedule, gated_layers, whole_columns
from skipdecode.block import Step
from skipdecode.cache import PlannedCache, sized_by
from skipdecode.checkpoint import CONFIG_KEY, SkipConfig
from skipdecode.cost import CostModel
from skipdecode.errors import ConfigError
from skipdecode.families import decoder_layers, text_config, unwrap
from skipdecode.graphs import StaticSteps, keep_static_steps, static_steps
from skipdecode.internals import (
    attention_name,
    dropped_by_generate,
    given_a_tokenizer,
    is_given_cache,
    next_arguments,
)
from skipdecode.lean import LeanDecoder, lean_decoder, why_not_lean
from skipdecode.loop import GenerativeModel, decode_loop
from skipdecode.projections import Weights
from skipdecode.schedule import SkipSchedule
from skipdecode.solver import check_speedup

# model -> what its schedules follow from, and the schedules by speedup
_SOLVED: weakref.WeakKeyDictionary[Any, tuple[Any, dict[float, SkipSchedule]]] = weakref.WeakKeyDictionary()


@given_a_tokenizer
def skip_generate(
    model: GenerativeModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    schedule: SkipSchedule | Mapping[str, Any] | None = None,
    speedup: float | None = None,
    weights: Weights | None = None,
    cuda_graphs: bool | None = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Decode greedily or by sampling while step i runs `schedule.layers_at(i)` alone.

    Pass it to transformers, which prepares everything and calls it:
    `model.generate(**inputs, custom_generate=skip_generate, speedup=3, max_new_tokens=64)`, or with a schedule of
    one's own. Prompts are padded on the left. Sampling settings, stopping criteria, streamers and
    `return_dict_in_generate` are generate's own.

    The cache is planned (`PlannedCache`, law 6) unless generate is given one, by `past_key_values` or by
    `cache_implementation`. With a planned cache, steps are lean (`skipdecode.lean`) where the model is made of plain
    parts and the call asks for nothing else, and go through its own forward pass elsewhere.

    The schedule is for the passes of this loop. What a logits processor or a stopping criterion runs of the model by
    itself, such as the pass without a prompt of `guidance_scale`, runs every layer. Several threads may decode with one
    model, at speeds of their own.

    Args:
        schedule: which layers each generated token runs; or its fields as plain values.
        speedup: a target in place of a schedule, for a model whose config says what it was trained for
            (`skipdecode.checkpoint.SkipConfig`); the schedule is the one that training drew for it, or is solved with
            the same settings.
        weights: what decode steps compute with; the prompt is run with the model's own. "packed" (on CPU, in float32
            and bfloat16): copies in the layout that the processor reads fastest. "int8" (on CPU): copies in 8 bits,
            and activations too (`skipdecode.int8`). "model": no copies. By default "packed" where it is possible and
            the copies fit in half of the memory that is free, else "model". The first call makes the copies, the next
            ones find them.
        cuda_graphs: whether lean steps are replayed as CUDA graphs (`skipdecode.graphs`), which are kept for the next
            calls of the same shape; by default on CUDA, unless the model's attention has a sliding window.
        tokenizer: for generate's `stop_strings` and `token_healing`.

    Returns:
        Token ids [batch, prompt columns + new tokens], or a GenerateDecoderOnlyOutput where it is asked for.

    Raises:
        ConfigError: without a schedule or a speedup or with both; for a schedule of another depth, or a speedup of a
            model that wasn't trained to skip; for beam search and the other ways of decoding that aren't greedy or
            sampling, `use_cache=False`, a cache that already holds tokens or is offloaded, attention or hidden state
            outputs, prompt tuning, more tokens than the model has positions, or weights that are copies where steps
            can't be lean.
    """
    schedule = resolve_schedule(model, schedule, speedup)
    if cuda_graphs not in (None, True, False):
        raise ConfigError(f"cuda_graphs is {cuda_graphs!r}: it must be True, False or None")
    _check_request(model, input_ids, stopping_criteria, generation_config, model_kwargs)
    prompt_plan = whole_columns(schedule.num_layers, schedule.prompt_layers)
    streamer = streamer or dropped_by_generate("streamer")
    with gated_layers(model, schedule, prompt_plan) as gate:
        steps = _steps(
            model, gate, schedule, input_ids, generation_config, synced_gpus, weights, cuda_graphs, model_kwargs
        )
        output = decode_loop(
            model,
            steps,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
        )
        steps.end()
        return output


class _ForwardSteps:
    """Prefill and decode steps through the model's own forward pass, behind gates."""

    def __init__(
        self, model: GenerativeModel, gate: LayerGate, schedule: SkipSchedule, model_kwargs: dict[str, Any]
    ) -> None:
        self._model = model
        self._gate = gate
        self._schedule = schedule
        self._kwargs = model_kwargs
        self._layers = {n: schedule.layers_for(n) for n in range(schedule.min_layers, schedule.max_layers + 1)}
        self._plans = {n: whole_columns(schedule.num_layers, layers) for n, layers in self._layers.items()}

    def prefill(self, input_ids: Any) -> torch.Tensor:
        """Run the prompt [batch, columns] and fill the cache. Returns the last column's logits [batch, vocabulary]."""
        inputs = self._model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **self._kwargs)
        return self._run(inputs)

    def step(self, i: int, input_ids: Any) -> torch.Tensor:
        """Run generated token i, the last column of `input_ids`. Returns logits [batch, vocabulary]."""
        budget = self._schedule.budget(i)
        self._gate.plan = self._plans[budget]
        with sized_by(self.cache, self._layers[budget]):
            inputs = self._model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **self._kwargs)
            return self._run(inputs)

    def _run(self, inputs: Any) -> torch.Tensor:
        with self._gate.obeyed():
            outputs = self._model(**inputs, return_dict=True)
        self._kwargs = next_arguments(self._model, outputs, self._kwargs)
        logits: torch.Tensor = outputs.logits[:, -1]
        return logits

    @property
    def cache(self) -> Any:
        return self._kwargs.get("past_key_values")

    def end(self) -> None:
        """Say that no step follows."""


class _LeanSteps(_ForwardSteps):
    """Prefill through the model's own forward pass; decode steps without it, on buffers that stay where `static`."""

    def __init__(
        self,
        model: GenerativeModel,
        gate: LayerGate,
        schedule: SkipSchedule,
        model_kwargs: dict[str, Any],
        *,
        decoder: LeanDecoder,
        step_of: Callable[[int], Step],
        static: StaticSteps | None,
    ) -> None:
        super().__init__(model, gate, schedule, model_kwargs)
        self._decoder = decoder
        self._step_of = step_of
        self._static = static

    def prefill(self, input_ids: Any) -> torch.Tensor:
        logits = super().prefill(input_ids)
        if self._static is not None:
            self._static.start(self._step_of(0), input_ids[:, -1])
        return logits

    def step(self, i: int, input_ids: Any) -> torch.Tensor:
        layers = self._layers[self._schedule.budget(i)]
        if self._static is not None:
            return self._static.run(input_ids[:, -1], layers, self._step_of(i))
        return self._decoder(input_ids[:, -1], layers, self.cache, self._step_of(i))

    def end(self) -> None:
        if self._static is not None:
            keep_static_steps(self._decoder, self._static)


def _steps(
    model: GenerativeModel,
    gate: LayerGate,
    schedule: SkipSchedule,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    synced_gpus: bool,
    weights: Weights | None,
    cuda_graphs: bool | None,
    model_kwargs: dict[str, Any],
) -> _ForwardSteps:
    """What runs the model, and with which cache."""
    inner = unwrap(model)
    given = is_given_cache(model_kwargs.get("past_key_values"))
    kinds = set(getattr(text_config(inner.config), "layer_types", None) or ())
    if given or generation_config.cache_implementation is not None:
        reason: str | None = "a cache was given"
    elif kinds - {"full_attention", "sliding_attention"}:
        reason = f"its layers are of the kinds {', '.join(sorted(kinds))}"  # some hold more than keys and values
    elif attention_name(inner.config) not in ALL_MASK_ATTENTION_FUNCTIONS:
        # Without a mask, what it doesn't attend to is what its own cache has dropped.
        reason = f"its attention {attention_name(inner.config)!r} takes no mask"
    else:
        shared = "several processes share it" if synced_gpus else None
        reason = shared or _more_than_a_token(model_kwargs) or why_not_lean(inner)
        steps = max(0, generation_config.max_length - input_ids.shape[1] - 1)
        model_kwargs = {**model_kwargs, "past_key_values": PlannedCache(schedule, steps)}
    if reason is not None:
        if weights not in (None, "model"):
            raise ConfigError(f"weights is {weights!r}, which this model can't decode with: {reason}")
        return _ForwardSteps(model, gate, schedule, model_kwargs)
    decoder = lean_decoder(inner, weights)
    mask = model_kwargs.get("attention_mask")
    if mask is None:  # generate drops one that hides nothing
        mask = input_ids.new_ones(len(input_ids), _prompt_columns(input_ids, model_kwargs))
    static = None
    if (input_ids.device.type == "cuda" if cuda_graphs is None else cuda_graphs) and not decoder.windowed:
        shape = (*mask.shape, bool(mask.all()))  # rows of one length share their places
        static = static_steps(decoder, schedule, steps, shape, keep=not generation_config.return_dict_in_generate)
        model_kwargs["past_key_values"] = static.cache
    step_of = decoder.steps(mask, steps, model_kwargs.get("position_ids"))
    return _LeanSteps(model, gate, schedule, model_kwargs, decoder=decoder, step_of=step_of, static=static)


# What of generate's arguments a lean step obeys, or may leave out because it is about the prompt or the cache.
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
    """Why a call's steps need the model's own forward pass: what it is given beside tokens, their places and a mask."""
    for name, value in model_kwargs.items():
        if value is not None and name not in _UNDERSTOOD:
            return f"{name} was given"
    for name in ("attention_mask", "position_ids"):
        value = model_kwargs.get(name)
        if value is not None and value.dim() != 2:
            return f"{name} has {value.dim()} dimensions"
    return None


def _prompt_columns(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> int:
    """How many columns the prompt fills in the cache."""
    embeds = model_kwargs.get("inputs_embeds")
    return int(input_ids.shape[1] if embeds is None else embeds.shape[1])


def resolve_schedule(
    model: GenerativeModel, schedule: SkipSchedule | Mapping[str, Any] | None, speedup: float | None
) -> SkipSchedule:
    """The schedule that `skip_generate` decodes with, of its arguments. Raises ConfigError as that says."""
    if schedule is not None and speedup is not None:
        raise ConfigError("both schedule and speedup are given: a schedule says how fast it is; leave one out")
    if isinstance(schedule, Mapping):
        return SkipSchedule.from_dict(schedule)
    if schedule is not None:
        check_schedule(schedule, decoder_layers(model))
        return schedule
    if speedup is None:
        raise ConfigError(
            "schedule is missing: model.generate(..., custom_generate=skip_generate, schedule=...), "
            "or speedup=... for a checkpoint that was trained to skip"
        )
    check_speedup(speedup)
    inner = unwrap(model)
    # What a schedule follows from; what is kept for another is forgotten.
    origin = (copy.deepcopy(getattr(inner.config, CONFIG_KEY, None)), len(decoder_layers(inner)), inner.dtype)
    known, solved = _SOLVED.get(inner, (None, {}))
    if known != origin:
        _SOLVED[inner] = (origin, solved := {})
    if float(speedup) not in solved:
        solved[float(speedup)] = _schedule_of(inner, float(speedup))
    return solved[float(speedup)]


def _schedule_of(model: Any, speedup: float) -> SkipSchedule:
    config = SkipConfig.of(model.config)
    if config is None:
        if speedup == 1:
            return SkipSchedule.full_depth(len(decoder_layers(model)))
        raise ConfigError(
            f"speedup is {speedup!r}, but this model's config doesn't say what schedules it was trained for: "
            "pass schedule=solve_schedule(model, speedup)"
        )
    schedule = config.schedule_for(CostModel.of(model), speedup)
    trained = config.trained_range
    if trained is not None and not trained[0] <= speedup <= trained[1]:
        logging.get_logger("transformers.skipdecode").warning(
            f"speedup {speedup:g} lies outside of {trained[0]:g} to {trained[1]:g}, for which this model was trained: "
            "expect worse texts"
        )
    return schedule


def _check_request(
    model: GenerativeModel,
    input_ids: torch.Tensor,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    if (generation_config.num_beams or 1) > 1:
        raise ConfigError(f"num_beams is {generation_config.num_beams}: skip_generate decodes greedily or samples")
    mode = generation_config.get_generation_mode(dropped_by_generate("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        asked = mode.value.replace("_", " ")
        raise ConfigError(f"{asked} is asked for: skip_generate decodes greedily or samples")
    prepare = vars(unwrap(model)).get("prepare_inputs_for_generation")
    if isinstance(wrapper := getattr(prepare, "__self__", None), nn.Module):
        unwrap(wrapper)  # peft calls its base model's generate with this one set; prompt tuning is refused
    if not model_kwargs.get("use_cache", True):
        raise ConfigError("use_cache is False: skip_generate needs the cache")
    cache = model_kwargs.get("past_key_values")
    if isinstance(cache, Cache) and cache.get_seq_length() > 0:
        raise ConfigError("past_key_values already holds tokens: skip_generate starts from a prompt and an empty cache")
    if getattr(cache, "offloading", False):
        raise ConfigError("the cache is offloaded: it fetches the next layer's keys and values, whether or not it runs")
    if generation_config.output_attentions or generation_config.output_hidden_states:
        raise ConfigError("output_attentions and output_hidden_states are not given: layers differ from step to step")
    _check_positions(model, input_ids, stopping_criteria.max_length, model_kwargs)


def _check_positions(
    model: GenerativeModel, input_ids: torch.Tensor, max_length: int | None, model_kwargs: dict[str, Any]
) -> None:
    positions = getattr(text_config(model.config), "max_position_embeddings", None)
    if positions is None:
        return
    mask, places = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if places is not None:
        prompt = int(places.max()) + 1
    else:
        prompt = int(mask.sum(dim=-1).max()) if mask is not None else _prompt_columns(input_ids, model_kwargs)
    # The last new token is never an input, so it needs no position.
    needed = prompt + (max_length - input_ids.shape[1] - 1 if max_length is not None else 0)
    if needed > positions:
        raise ConfigError(
            f"the longest prompt has {prompt} tokens, {needed} positions are needed and the model has {positions}: "
            "shorten the prompt or lower max_new_tokens"
        )
