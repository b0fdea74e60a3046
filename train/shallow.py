"""Shallow models: some of a model's layers and the rest of it, as a plain checkpoint of fewer layers."""

from transformers import PretrainedConfig, PreTrainedModel

from skipdecode import ConfigError, SkipSchedule
from skipdecode.families import decoder_layers, text_config
from skipdecode.prune import keep_in_config, keep_layers


def kept_layers(num_layers: int, keep: int) -> tuple[int, ...]:
    """The layers that a shallow model keeps: evenly spaced, the first and the last among them.

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
    kept = kept_layers(text_config(config).num_hidden_layers, keep)
    try:
        keep_in_config(config, kept)
    except ConfigError as error:
        raise ConfigError(f"model.layers is {keep}: {error}") from error


def shrink_model(model: PreTrainedModel, keep: int) -> None:
    """Take all layers but `keep` out of a model (DistilBERT's way to make a student, Sanh et al. 2019).

    Its logits are then those of the whole model when it skips the same layers for every column.

    Args:
        model: changed in place, with its config.
        keep: layers that stay.

    Raises:
        ConfigError: as `shrink_config` does, before anything is changed.
    """
    kept = kept_layers(len(decoder_layers(model)), keep)
    try:
        keep_layers(model, kept)
    except ConfigError as error:
        raise ConfigError(f"model.layers is {keep}: {error}") from error
