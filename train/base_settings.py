"""The base model's generation settings, which the finished checkpoint inherits and which are checked before training.

They come from `generation_config.json`, or in older models from `config.json`. Settings that decoding with layer
skipping doesn't use are omitted from the finished checkpoint, and a message says so. All others are tried: a tiny model
with the same vocabulary decodes a few tokens with them, with plain `generate`, with layers skipped, and as the server
does. A setting that fails would make the finished checkpoint fail too, so it is an error before the first step.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.trainer_utils import align_special_tokens

from skipdecode import ConfigError, SkipSchedule, skip_generate
from skipdecode.checkpoint.loading import downloaded, warnings_off
from skipdecode.checkpoint.offline import without_network
from skipdecode.engine.prepare import Preparer
from skipdecode.errors import first_line
from skipdecode.families import text_config
from train.recipe import Recipe

GENERATION_FILE, MODEL_FILE = "generation_config.json", "config.json"
# Generation settings that are omitted: skip decoding has its own cache, decodes one token at a time without beams, and
# ends a sequence at its end token.
_LEFT_OUT = (
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len"),
    *("num_beams", "num_beam_groups", "diversity_penalty", "num_return_sequences", "low_memory"),
    *("stop_strings", "token_healing", "is_assistant", "return_dict_in_generate"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
)
# Values of these that request nothing; of all others, false values do.
_DEFAULTS = {"use_cache": True, "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1}
# Settings in a model's config that would change what its forward pass returns, with the values that are needed.
_OF_THE_CONFIG = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
_OF_SAMPLING = ("temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_OF_BEAMS = ("early_stopping", "length_penalty")
_NEW_TOKENS = 3  # number of tokens that the tiny model decodes: a first, a middle and a last one


@dataclass(frozen=True)
class _Source:
    """The file of the base model that holds its generation settings.

    Attributes:
        recipe: the recipe that names the base model.
        file: generation_config.json, or config.json where there is no such file.
        settings: the generation settings in the file.
    """

    recipe: Recipe
    file: str
    settings: dict[str, Any]

    @classmethod
    def of(cls, recipe: Recipe) -> "_Source":
        """Read the settings. Raises ConfigError for a damaged file, which transformers would silently ignore."""
        if recipe.model.gguf_file is not None:  # no other file in the folder is read
            return cls(recipe, MODEL_FILE, {})
        found = _read(recipe.model.name_or_path, GENERATION_FILE)
        if found is not None:
            return cls(recipe, GENERATION_FILE, found)
        known = vars(GenerationConfig())
        in_config = _read(recipe.model.name_or_path, MODEL_FILE) or {}
        return cls(recipe, MODEL_FILE, {key: value for key, value in in_config.items() if key in known})

    def place(self, key: str, file: str) -> str:
        """Name a setting together with the file or the recipe key in which it is set."""
        section = self.recipe.model
        of_config = file == MODEL_FILE and key in (section.config or {})
        if section.name_or_path is None:
            return f"model.config.{key}" if of_config else f"{key} in model.shape {section.shape!r}"
        if of_config and key in _OF_THE_CONFIG:
            return f"model.config.{key}"
        return f"{key} in {file} of {section.name_or_path!r}"


def _read(name: str | None, file: str) -> dict[str, Any] | None:
    """The contents of a model's JSON file; None where there is none. Raises ConfigError for a damaged file."""
    if name is None:
        return None
    path = Path(name, file) if Path(name).is_dir() else downloaded(name, file, without_network(name))
    if path is None or not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} of {name!r} is damaged: {first_line(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} of {name!r} is damaged: expected an object, found {str(values)[:40]!r}")
    return values


def check_readable(recipe: Recipe) -> None:
    """Raise ConfigError where transformers can't read the base model's generation settings; needs no weights."""
    source = _Source.of(recipe)
    refused = _first_refused(source.settings, lambda values: GenerationConfig(**values).to_json_string())
    if refused is not None:
        key, error = refused
        raise ConfigError(f"{source.place(key, source.file)} is {source.settings[key]!r}: {first_line(error)}")


def settle_generation(recipe: Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Change a model's generation settings, in place, so that the finished checkpoint can decode with them.

    ZeRO-3 must be off, because a tiny model is built and decodes.

    Args:
        recipe: the recipe of the run.
        model: the model to train.
        tokenizer: its tokenizer.

    Returns:
        The omitted settings, each with its file and value. Sampling and beam settings that are unused anyway (such as a
        temperature without do_sample) are omitted without being listed.

    Raises:
        ConfigError: for a setting that decoding can't use, naming the file and the key; with lora.merge=false also for
            a setting that would be omitted, because the adapters' base model keeps its files.
    """
    source = _Source.of(recipe)
    if model.config.is_encoder_decoder:
        raise ConfigError(f"{source.place('is_encoder_decoder', MODEL_FILE)} is True: only decoders can be trained")
    align_special_tokens(model, tokenizer)  # as the Trainer will
    found = _leave_out(source, model)
    if found and recipe.lora.r is not None and not recipe.lora.merge:
        raise ConfigError(
            f"{found[0]}: with lora.merge=false the adapters are loaded onto the unchanged base model, which can't "
            "decode with layer skipping; set lora.merge=true, or train from a copy of the base without this setting"
        )
    _check_decodes(source, model.generation_config, text_config(model.config).vocab_size)
    return found


def _leave_out(source: _Source, model: PreTrainedModel) -> list[str]:
    """Remove the settings that decoding doesn't use. Returns those that requested something, with file and value."""
    found: dict[str, Any] = {}
    config: Any = model.generation_config
    for key in _LEFT_OUT:
        value = getattr(config, key, None)
        asks = value is not None and (value != _DEFAULTS[key] if key in _DEFAULTS else bool(value))
        # transformers sets return_dict_in_generate itself where the config sets output_attentions.
        if asks and (key != "return_dict_in_generate" or key in source.settings):
            found[source.place(key, source.file)] = value
        setattr(config, key, None)
    for key, usual in _OF_THE_CONFIG.items():
        for each in _configs(model):
            value = getattr(each, key, None)
            if value not in (None, usual):
                found[source.place(key, MODEL_FILE)] = value
                setattr(each, key, usual)
    for key in (*(_OF_SAMPLING if config.do_sample is not True else ()), *_OF_BEAMS):
        setattr(config, key, None)
    return [f"{place} is {value!r}" for place, value in found.items()]


def _configs(model: PreTrainedModel) -> list[PretrainedConfig]:
    """The configs of a model and of its submodules, which may have their own."""
    found = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in found if isinstance(config, PretrainedConfig)}.values())


def _check_decodes(source: _Source, config: GenerationConfig, vocab_size: int) -> None:
    """Raise ConfigError where a checkpoint with this generation config couldn't decode."""
    settings = json.loads(config.to_json_string())  # as the checkpoint's file will be read
    with torch.random.fork_rng(devices=[]):
        shape: dict[str, Any] = {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
        }
        model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **shape)).eval()
        refused = _first_refused(settings, lambda values: _decode_a_little(model, values))
    if refused is not None:
        key, error = refused
        raise ConfigError(
            f"{source.place(key, source.file)} is {settings[key]!r}: the finished checkpoint couldn't decode with it "
            f"({first_line(error)}); remove it there"
        )


def _decode_a_little(model: Any, settings: dict[str, Any]) -> None:
    """Decode in each way that a finished checkpoint supports. Raises any error."""
    torch.default_generator.manual_seed(0)
    model.generation_config = GenerationConfig(**settings)
    model.generation_config.validate(strict=True)  # as transformers does before it saves the file
    skipping: dict[str, Any] = {
        "custom_generate": skip_generate,
        "schedule": SkipSchedule.full_depth(1),
        "weights": "model",
    }
    for length in (1, 3):
        ids = torch.zeros(2, length, dtype=torch.long)
        request: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": _NEW_TOKENS}
        model.generate(ids, **request, **skipping, do_sample=False)
        model.generate(ids, **request, **skipping)
        model.generate(ids, **request)
    Preparer(model, None)([0], {"max_new_tokens": _NEW_TOKENS, "do_sample": False})  # as the server does


def _first_refused(
    settings: Mapping[str, Any], attempt: Callable[[dict[str, Any]], object]
) -> tuple[str, Exception] | None:
    """The first setting that makes an attempt fail when added to those before it, with the error; None if none does."""

    def error_with(count: int) -> Exception | None:
        try:
            with warnings_off(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                attempt(dict(islice(settings.items(), count)))
        except Exception as error:  # settings reach all parts of transformers, which raise any kind of error
            return error
        return None

    if error_with(len(settings)) is None:
        return None
    failed = ((key, error_with(count)) for count, key in enumerate(settings, start=1))
    return next((key, error) for key, error in failed if error is not None)
