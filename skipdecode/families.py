"""Where a model family keeps its decoder layers, and how one finds them under wrappers."""

from typing import Any, cast

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from skipdecode.errors import ConfigError

# model_type of the config -> path from the causal LM to the ModuleList of its decoder layers.
LAYER_PATHS: dict[str, str] = {
    "opt": "model.decoder.layers",
    "gpt2": "transformer.h",
    "gpt_neox": "gpt_neox.layers",
    "llama": "model.layers",
    "mistral": "model.layers",
    "qwen2": "model.layers",
    "qwen3": "model.layers",
    "gemma": "model.layers",
    "phi": "model.layers",
}


def register_family(model_type: str, layers: str) -> None:
    """Name the path to the decoder layers of a family that isn't in the table, such as `"model.layers"`."""
    LAYER_PATHS[model_type] = layers


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside wrappers of peft, DistributedDataParallel or DeepSpeed.

    Raises ConfigError where there is none, and for peft's prompt tuning, whose virtual tokens shift the columns.
    """
    while not isinstance(model, PreTrainedModel):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ConfigError("prompt tuning adds virtual columns, so a schedule can't be applied; use LoRA")
        inner = _base_model(model)
        if inner is None:
            raise ConfigError(f"{type(model).__name__} is not a transformers model: a schedule can't be applied to it")
        model = inner
    return model


def _base_model(wrapper: nn.Module) -> nn.Module | None:
    """One wrapper less: peft's, or one that keeps the model in `module`."""
    if hasattr(wrapper, "get_base_model"):
        return cast(nn.Module, cast(Any, wrapper).get_base_model())
    return getattr(wrapper, "module", None)


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a config that describes the decoder."""
    return config.get_text_config(decoder=True)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a (possibly wrapped) model, bottom first.

    Raises ConfigError for a family that isn't known, naming `register_family` as the way to add it.
    """
    inner = unwrap(model)
    model_type = inner.config.model_type
    if model_type not in LAYER_PATHS:
        raise ConfigError(
            f"model_type {model_type!r} is not known: name its layers with skipdecode.families.register_family "
            f"(known: {', '.join(sorted(LAYER_PATHS))})"
        )
    path = LAYER_PATHS[model_type]
    try:
        layers = inner.get_submodule(path)
    except AttributeError as error:
        raise ConfigError(f"{type(inner).__name__} has no {path!r}: pass the causal language model itself") from error
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise ConfigError(f"{path!r} of {type(inner).__name__} is not a list of layers")
    return layers
