"""Model shapes: configs in configs/model/ from which models with random weights are made."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from configs.files import ROOT, named_file, read_yaml
from skipdecode.errors import ConfigError, first_line, unknown
from skipdecode.families import text_config
from skipdecode.schedule.schedule import MAX_LAYERS

SHAPES = ROOT / "configs" / "model"
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
# Under transformers' common names, to which each family maps its own.
_SIZES_OF_WEIGHTS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "ffn_dim", "n_inner", "word_embed_proj_dim"),
)


def read_shape(name: str, field: str) -> dict[str, Any]:
    """Read the config values of a shape, by its name in configs/model/ or its path; they include `model_type`.

    Raises ConfigError, which names `field`, for a missing or invalid file.
    """
    path = named_file(name, SHAPES, ".yaml", field)
    shape = read_yaml(path)
    if "model_type" not in shape:
        raise ConfigError(f"{path} lacks model_type, such as opt")
    return shape


def shape_config(shape: Mapping[str, Any]) -> PretrainedConfig:
    """Make a config from a shape's values. Raises ConfigError for values that are invalid or unknown to the family."""
    values = dict(shape)
    layers = next((values[name] for name in _LAYERS if name in values), 1)
    if isinstance(layers, int) and layers > MAX_LAYERS:  # some families list them, and all would be built
        raise ConfigError(f"num_hidden_layers is {layers}: it must be at most {MAX_LAYERS}")
    for name in set(_SIZES_OF_WEIGHTS) & set(values):  # checked first, because transformers would print warnings
        _check_size(name, values[name])
    model_type = values.pop("model_type")
    config: PretrainedConfig = _made(lambda: AutoConfig.for_model(model_type, **values))
    # A key of another name for a known setting, such as rope_theta, leaves no attribute of its own, and needs no check.
    # A setting of generate leaves none either, and must be reported.
    _check_keys(config, [key for key in values if key in vars(config) or key in vars(GenerationConfig())])
    _check_values(config)
    with torch.device("meta"):  # build the model without memory, because layers check more values than the config does
        _made(lambda: AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    return config


def changed_config(config: PretrainedConfig, changes: Mapping[str, Any]) -> PretrainedConfig:
    """Change values in the config of a pretrained model.

    Raises ConfigError for unknown keys, invalid values, and sizes of the weights.
    """
    _check_keys(config, changes)
    names = config.attribute_map
    for key in changes:
        if names.get(key, key) in {names.get(size, size) for size in _SIZES_OF_WEIGHTS}:
            raise ConfigError(f"{key} can't be changed: the pretrained weights have this size")
    changed: PretrainedConfig = _made(lambda: type(config).from_dict({**config.to_dict(), **changes}))
    _check_values(changed)
    return changed


def random_model(shape: Mapping[str, Any] | PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Make a causal language model with random weights. Raises ConfigError for values that its family rejects."""
    config = shape if isinstance(shape, PretrainedConfig) else shape_config(shape)
    model: PreTrainedModel = _made(
        lambda: AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    )
    return model


def _check_keys(config: PretrainedConfig, keys: Iterable[str]) -> None:
    """Raises ConfigError for a key that the family doesn't know; transformers would store it and never read it."""
    known = {*type(config)().to_dict(), *type(config).__dataclass_fields__, *config.attribute_map} - {"model_type"}
    for key in keys:
        if key not in known and key in vars(GenerationConfig()):
            raise ConfigError(f"{key} is a generation setting, which the config of {config.model_type} doesn't have")
        if key not in known:
            raise unknown(f"key of the config of {config.model_type}", str(key), known)


def _check_values(config: PretrainedConfig) -> None:
    """Raises ConfigError for values that the config class accepts but with which no model can be built or trained."""
    text = text_config(config)
    for name in (*_SIZES_OF_WEIGHTS, "max_position_embeddings"):
        _check_size(name, getattr(text, name, None))
    for name, value in text.to_dict().items():
        if name in ("init_std", "initializer_range") and isinstance(value, int | float) and value < 0:
            raise ConfigError(f"{name} is {value}: it must not be below 0")
        if "drop" in name and isinstance(value, int | float) and not 0 <= value <= 1:
            raise ConfigError(f"{name} is {value}: it must lie between 0 and 1")
    heads, shared = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
    if shared is not None and heads % shared:
        raise ConfigError(f"num_attention_heads is {heads}: it must be a multiple of num_key_value_heads ({shared})")


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, int) and value < 1:
        raise ConfigError(f"{name} is {value}: it must be at least 1")


def _made(make: Callable[[], Any]) -> Any:
    """Build something from a user's values. Raises ConfigError for any error, since families raise all kinds."""
    try:
        return make()
    except Exception as error:
        raise ConfigError(first_line(error)) from error
