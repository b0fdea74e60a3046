"""Shallow models: some of a model's layers and the rest of it, as a plain checkpoint of fewer layers."""

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from skipdecode import ConfigError, SkipSchedule
from skipdecode.families import decoder_layers, text_config


def kept_layers(num_layers: int, keep: int) -> tuple[int, ...]:
    """Which layers a shallow model keeps: evenly spaced, the first and the last among them.

    They are those that a constant budget of `keep` runs under even placement. One layer alone is the first.

    Args:
        num_layers: of the whole model.
        keep: of the shallow one.

    Raises:
        ConfigError: unless 1 <= keep <= num_layers.

    >>> kept_layers(12, 4)
    (0, 4, 7, 11)
    """
    if not 1 <= keep <= num_layers:
        raise ConfigError(f"model.layers is {keep}: it must lie between 1 and the model's {num_layers} layers")
    return SkipSchedule(num_layers, keep, keep, placement="even").layers_for(keep)


def shrink_config(config: PretrainedConfig, keep: int) -> None:
    """Make a config that of the shallow model. Raises ConfigError as `kept_layers` does.

    Also where a layer computes by its number, which in the shallow model is another one.
    """
    text: Any = text_config(config)
    if getattr(text, "scale_attn_by_inverse_layer_idx", False):  # GPT-2
        raise ConfigError(
            f"model.layers is {keep}: this model's layers scale attention by their number "
            "(scale_attn_by_inverse_layer_idx), so none can be left out"
        )
    kept = kept_layers(text.num_hidden_layers, keep)
    kinds = getattr(text, "layer_types", None)
    text.num_hidden_layers = keep  # whatever the family calls it: configs map the name
    if kinds is not None:
        text.layer_types = [kinds[layer] for layer in kept]


def shrink_model(model: PreTrainedModel, keep: int) -> None:
    """Take all layers but `keep` out of a model (DistilBERT's way to make a student, Sanh et al. 2019).

    Its logits are then those of the whole model when it skips the same layers for every column.

    Args:
        model: changed in place, with its config.
        keep: layers that stay.

    Raises:
        ConfigError: as `shrink_config` does, before anything is changed.
    """
    layers = decoder_layers(model)
    kept = kept_layers(len(layers), keep)
    shrink_config(model.config, keep)
    for index in reversed(range(len(layers))):
        if index not in kept:
            del layers[index]
    for number, layer in enumerate(layers):
        numbered: list[Any] = [module for module in layer.modules() if hasattr(module, "layer_idx")]
        for module in numbered:
            module.layer_idx = number  # where its keys and values are in a cache
