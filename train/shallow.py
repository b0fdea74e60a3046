"""Shallow models: plain checkpoints that keep only some of a model's layers."""

from collections.abc import Sequence

from transformers import PretrainedConfig, PreTrainedModel

from skipdecode import ConfigError, SkipSchedule
from skipdecode.checkpoint.export import keep_layers, keep_layers_in_config
from skipdecode.families import decoder_layers, text_config
from skipdecode.schedule.schedule import Placement


def kept_layers(
    num_layers: int, keep: int, placement: Placement | None = None, order: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The layers that a shallow model keeps: those that a constant budget of `keep` runs; for 1, the first layer.

    Args:
        num_layers: number of layers of the full model.
        keep: number of layers of the shallow model.
        placement: which layers are kept; None: "even", spaced over the depth with the first and the last.
        order: only with placement "order", as in SkipSchedule.

    Raises:
        ConfigError: unless 1 <= keep <= num_layers.

    >>> kept_layers(12, 4), kept_layers(12, 4, "top"), kept_layers(12, 4, "ends")
    ((0, 4, 7, 11), (0, 9, 10, 11), (0, 1, 10, 11))
    """
    if not 1 <= keep <= num_layers:
        raise ConfigError(f"model.layers is {keep}: it must lie between 1 and the model's {num_layers} layers")
    order = None if order is None else tuple(order)
    return SkipSchedule(num_layers, keep, keep, placement=placement or "even", order=order).layers_for(keep)


def shrink_config(
    config: PretrainedConfig, keep: int, placement: Placement | None = None, order: Sequence[int] | None = None
) -> None:
    """Change a config, in place, to the shallow model's.

    Raises ConfigError as `kept_layers` does, and where a layer's computation depends on its index, which would change.
    """
    kept = kept_layers(text_config(config).num_hidden_layers, keep, placement, order)
    try:
        keep_layers_in_config(config, kept)
    except ConfigError as error:
        raise ConfigError(f"model.layers is {keep}: {error}") from error


def shrink_model(
    model: PreTrainedModel, keep: int, placement: Placement | None = None, order: Sequence[int] | None = None
) -> None:
    """Remove all but `keep` layers from a model, as DistilBERT's student is made (Sanh et al. 2019).

    Its logits are then those of the full model that skips the same layers at every position.

    Args:
        model: the model, changed in place with its config.
        keep: number of layers that stay.
        placement: see `kept_layers`.
        order: see `kept_layers`.

    Raises:
        ConfigError: as `shrink_config` does, before anything is changed.
    """
    kept = kept_layers(len(decoder_layers(model)), keep, placement, order)
    try:
        keep_layers(model, kept)
    except ConfigError as error:
        raise ConfigError(f"model.layers is {keep}: {error}") from error
