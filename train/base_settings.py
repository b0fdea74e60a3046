"""What a base model's files say of generation: checked, and settled for the finished checkpoint, before any step.

A finished checkpoint inherits its base's `generation_config.json`, or what older models have of it in `config.json`.
Settings that decoding has no use for are left out of it, which is said once. All others are tried: a tiny model of the
same vocabulary decodes a few tokens with them, as transformers does, with layers skipped, and as the server does. What
fails there would fail with the finished checkpoint, after its last step, and is refused.
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
# Settings of generation that say nothing of the text, or that texts of a fine-tuned model do without: it has a cache of
# its own, decodes token by token, and ends a text with its end token.
_LEFT_OUT = (
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len"),
    *("num_beams", "num_beam_groups", "diversity_penalty", "num_return_sequences", "low_memory"),
    *("stop_strings", "token_healing", "is_assistant", "return_dict_in_generate"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
)
_USUAL = {"use_cache": True, "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1}  # else what is false
# Those of a model's config that would change what its forward pass returns.
_OF_THE_CONFIG = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
_OF_SAMPLING = ("temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_OF_BEAMS = ("early_stopping", "length_penalty")
_NEW_TOKENS = 3  # that are tried: a first, a middle and a last one


@dataclass(frozen=True)
class _Source:
    """Where a recipe's model has its settings from.

    Attributes:
        recipe: whose model it is.
        file: of the base model, that says how it generates; the model's own config where no other does.
        settings: what it says.
    """

    recipe: Recipe
    file: str
    settings: dict[str, Any]

    @classmethod
    def of(cls, recipe: Recipe) -> "_Source":
        """Raises ConfigError for a file that is damaged, which transformers would pass over."""
        if recipe.model.gguf_file is not None:  # nothing beside it is read
            return cls(recipe, MODEL_FILE, {})
        found = _read(recipe.model.name_or_path, GENERATION_FILE)
        if found is not None:
            return cls(recipe, GENERATION_FILE, found)
        known = vars(GenerationConfig())
        in_config = _read(recipe.model.name_or_path, MODEL_FILE) or {}
        return cls(recipe, MODEL_FILE, {key: value for key, value in in_config.items() if key in known})

    def place(self, key: str, file: str) -> str:
        """A setting with the file, or the key of the recipe, that it stands in."""
        section = self.recipe.model
        of_config = file == MODEL_FILE and key in (section.config or {})
        if section.name_or_path is None:
            return f"model.config.{key}" if of_config else f"{key} in model.shape {section.shape!r}"
        if of_config and key in _OF_THE_CONFIG:
            return f"model.config.{key}"
        return f"{key} in {file} of {section.name_or_path!r}"


def _read(name: str | None, file: str) -> dict[str, Any] | None:
    """The values of a model's file; None where there is none. Raises ConfigError for a damaged one."""
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
    """Raise ConfigError where transformers can't read what the base model's files say of generation.

    It is for before the weights are loaded.
    """
    source = _Source.of(recipe)
    refused = _first_refused(source.settings, lambda values: GenerationConfig(**values).to_json_string())
    if refused is not None:
        key, error = refused
        raise ConfigError(f"{source.place(key, source.file)} is {source.settings[key]!r}: {first_line(error)}")


def settle_generation(recipe: Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Make a model's settings such that its finished checkpoint can decode with them.

    Settings of sampling or beams that ask for neither go without a word: transformers writes them only as it found
    them. ZeRO-3 must not be on: a tiny model is made, and decodes.

    Returns:
        What else was left out, with its value and where it stood.

    Raises:
        ConfigError: for what the finished checkpoint couldn't decode with, with the file and the key; with adapters
            that stay apart, whose base keeps its files, also for what would be left out.
    """
    source = _Source.of(recipe)
    if model.config.is_encoder_decoder:
        raise ConfigError(f"{source.place('is_encoder_decoder', MODEL_FILE)} is True: decoders alone are trained here")
    align_special_tokens(model, tokenizer)  # as the Trainer will
    found = _leave_out(source, model)
    if found and recipe.lora.r is not None and not recipe.lora.merge:
        raise ConfigError(
            f"{found[0]}: with lora.merge=false the adapters are loaded onto the base as it is, which can't be decoded "
            "with layers skipped then; set lora.merge=true, or train from a copy of the base without this setting"
        )
    _check_decodes(source, model.generation_config, text_config(model.config).vocab_size)
    return found


def _leave_out(source: _Source, model: PreTrainedModel) -> list[str]:
    """Take out what decoding has no use for. Returns what asked for something, with its value and where it stood."""
    found: dict[str, Any] = {}
    config: Any = model.generation_config
    for key in _LEFT_OUT:
        value = getattr(config, key, None)
        asks = value is not None and (value != _USUAL[key] if key in _USUAL else bool(value))
        # Beside a config's output_attentions transformers sets return_dict_in_generate itself.
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
    """The configs of a model and of all of its parts, which read their own."""
    found = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in found if isinstance(config, PretrainedConfig)}.values())


def _check_decodes(source: _Source, config: GenerationConfig, vocab_size: int) -> None:
    """Raise ConfigError where a checkpoint with such a generation config couldn't decode."""
    settings = json.loads(config.to_json_string())  # what will be read of the checkpoint
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
            f"({first_line(error)}); take it out there"
        )


def _decode_a_little(model: Any, settings: dict[str, Any]) -> None:
    """Decode in each way that a finished checkpoint is for. Raises whatever goes wrong."""
    torch.default_generator.manual_seed(0)
    model.generation_config = GenerationConfig(**settings)
    model.generation_config.validate(strict=True)  # as transformers does before it writes it
    skipping: dict[str, Any] = {
        "custom_generate": skip_generate,
        "schedule": SkipSchedule.full_depth(1),
        "weights": "model",
    }
    for columns in (1, 3):
        ids = torch.zeros(2, columns, dtype=torch.long)
        request: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": _NEW_TOKENS}
        model.generate(ids, **request, **skipping, do_sample=False)
        model.generate(ids, **request, **skipping)
        model.generate(ids, **request)
    Preparer(model, None)([0], {"max_new_tokens": _NEW_TOKENS, "do_sample": False})  # as the server does


def _first_refused(
    settings: Mapping[str, Any], attempt: Callable[[dict[str, Any]], object]
) -> tuple[str, Exception] | None:
    """The setting with which, after those before it, an attempt begins to fail, and its error; None where none does."""

    def error_with(count: int) -> Exception | None:
        try:
            with warnings_off(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                attempt(dict(islice(settings.items(), count)))
        except Exception as error:  # no narrower one: settings reach all parts of transformers
            return error
        return None

    if error_with(len(settings)) is None:
        return None
    failed = ((key, error_with(count)) for count, key in enumerate(settings, start=1))
    return next((key, error) for key, error in failed if error is not None)
