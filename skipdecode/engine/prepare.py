"""Prepares the requests of an engine: transformers' own `generate` interprets their settings."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from skipdecode.errors import ConfigError, first_line
from skipdecode.generate.runners import why_no_fast_path
from skipdecode.generate.skip_generate import check_request, check_unhealed
from skipdecode.generate.stopping import limited_config
from skipdecode.internals import receives_tokenizer

MIN_TEMPERATURE = 1e-5  # below it scores overflow; sampling would be greedy anyway
MAX_KEPT = 4096  # prepared settings
# Processors and criteria without state, which depend on nothing of a prompt but its length.
_STATELESS = {MaxLengthCriteria, EosTokenCriteria, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper}
# Arguments of `generate` that aren't settings.
_NOT_SETTINGS = (
    *("inputs", "input_ids", "attention_mask", "inputs_embeds", "position_ids", "past_key_values", "streamer"),
    *("custom_generate", "synced_gpus", "tokenizer", "assistant_model", "weights", "cuda_graphs", "draft_counts"),
)


@dataclass(frozen=True)
class PreparedRequest:
    """What `generate` passes to a decoding loop for one prompt, whose token ids are [1, prompt length]."""

    input_ids: torch.Tensor
    processor: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig

    @property
    def new_tokens(self) -> int:
        """Maximum number of new tokens."""
        return int(self.config.max_length - self.input_ids.shape[1])


class Preparer:
    """Has `generate` prepare prompts with the settings of their requests.

    If all settings are plain values, and lead to stateless processors and criteria only, the result depends on nothing
    of the prompt but its length. Such results are kept and used again: servers get the same settings again and again,
    and `generate` takes longer to prepare a request than a small model takes to decode it. The model must not change.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._kept: dict[Any, PreparedRequest] = {}
        self._defaults: dict[str, Any] = {}

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model has embeddings for."""
        return int(self._model.get_input_embeddings().num_embeddings)

    def __call__(self, prompt: Sequence[int], settings: dict[str, Any]) -> PreparedRequest:
        """Prepare a prompt with `generate`'s settings. Raises ConfigError for what an engine can't decode."""
        if len(prompt) == 0:
            raise ConfigError("the prompt is empty: it must have at least one token")
        vocabulary = self.vocabulary
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int | Integral):
                raise ConfigError(f"the prompt holds {token!r}: token ids are integers from 0 to {vocabulary - 1}")
            if not 0 <= token < vocabulary:
                raise ConfigError(
                    f"the prompt holds token {token}: the model's token ids go from 0 to {vocabulary - 1}"
                )
        input_ids = torch.tensor([list(prompt)], device=self._model.device)
        defaults = vars(self._model.generation_config)
        if defaults != self._defaults:
            self._kept.clear()
            self._defaults = copy.deepcopy(defaults)  # lists in it may be changed in place
        key = (len(prompt), *((name, type(value), value) for name, value in sorted(settings.items())))
        plain = all(isinstance(value, int | float | str | None) for value in settings.values())
        kept = self._kept.get(key) if plain else None
        if kept is not None:
            return replace(kept, input_ids=input_ids)
        prepared = self._prepare(input_ids, settings)
        if plain and {type(part) for part in (*prepared.processor, *prepared.criteria)} <= _STATELESS:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            self._kept[key] = prepared
        return prepared

    def _prepare(self, input_ids: torch.Tensor, settings: dict[str, Any]) -> PreparedRequest:
        for name in _NOT_SETTINGS:
            if settings.get(name) is not None:
                raise ConfigError(f"{name} is given: an engine accepts a prompt's token ids and settings of generate")
        check_unhealed(settings.get("token_healing", self._model.generation_config.token_healing))
        try:
            prepared: PreparedRequest = self._model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                custom_generate=_prepare_only,
                tokenizer=self._tokenizer,  # the checkpoint's own settings may have stop strings, too
                **settings,
            )
        except ConfigError:
            raise
        except ValueError as error:  # raised by generate for unknown settings and invalid values
            raise ConfigError(f"generate refuses these settings: {first_line(error)}") from error
        temperature = prepared.config.temperature
        if prepared.config.do_sample and temperature is not None and not MIN_TEMPERATURE <= temperature < math.inf:
            raise ConfigError(f"temperature is {temperature}: it must be at least {MIN_TEMPERATURE:g} for sampling")
        return prepared


@receives_tokenizer
def _prepare_only(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> PreparedRequest:
    """A `custom_generate` that decodes nothing and returns what `generate` has prepared."""
    generation_config = limited_config(generation_config, stopping_criteria)
    check_request(model, input_ids, generation_config, model_kwargs)
    count = len(input_ids)
    if count > 1:
        raise ConfigError(f"num_return_sequences is {count}: submit {count} requests instead, each with its own seed")
    if generation_config.return_dict_in_generate:
        raise ConfigError(
            "return_dict_in_generate is True: an engine returns tokens, and their probabilities if logprobs is given"
        )
    if any(isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor) for processor in logits_processor):
        raise ConfigError("guidance_scale is given: an engine doesn't run the second pass that guidance needs")
    reason = why_no_fast_path(model, generation_config, synced_gpus, model_kwargs)
    if reason is not None:
        raise ConfigError(f"an engine can't decode with this model: {reason}")
    return PreparedRequest(input_ids, logits_processor, stopping_criteria, generation_config)
