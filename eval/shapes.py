"""Model shapes: a config without weights, named in configs/model/."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from eval.files import ROOT, named_file, read_yaml
from skipdecode.errors import ConfigError, first_line

SHAPES = ROOT / "configs" / "model"


def read_shape(name: str, field: str) -> dict[str, Any]:
    """The config values of a name in configs/model/, or of a YAML file; `model_type` is among them.

    Raises ConfigError that names `field`.
    """
    path = named_file(name, SHAPES, ".yaml", field)
    shape = read_yaml(path)
    if "model_type" not in shape:
        raise ConfigError(f"{path} lacks model_type, such as opt")
    return shape


def shape_config(shape: Mapping[str, Any]) -> PretrainedConfig:
    """The config of a shape's values. Raises ConfigError for those that its family refuses."""
    values = dict(shape)
    try:
        config: PretrainedConfig = AutoConfig.for_model(values.pop("model_type"), **values)
    except (ValueError, KeyError) as error:
        raise ConfigError(first_line(error)) from error
    return config


def random_model(shape: Mapping[str, Any] | PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model with random weights. Raises ConfigError for values that its family refuses."""
    config = shape if isinstance(shape, PretrainedConfig) else shape_config(shape)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ValueError, KeyError) as error:
        raise ConfigError(first_line(error)) from error
    return model
