"""Shallow models: some of a model's layers and the rest of it, as a plain checkpoint of fewer layers."""

from collections.abc import Sequence

from transformers import PretrainedConfig, PreTrainedModel

from skipdecode import ConfigError, SkipSchedule
from skipdecode.checkpoint.export import keep_layers, keep_layers_in_config
from skipdecode.families import decoder_layers, text_config
from skipdecode.schedule.schedule import Placement


def kept_layers(
    num_layers: int, keep: int, placement: Placement | None = None, order: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The layers that a shallow model keeps: those that a constant budget of `keep` runs. One alone is the first.

    Args:
        num_layers: of the whole model.
        keep: of the shallow one.
        placement: where they lie; None: even, spaced over the depth, the first and the last among them.
        order: with placement "order" alone, as in SkipSchedule.

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
    """Make a config that of the shallow model. Raises ConfigError as `kept_layers` does.

    Also where a layer computes by its number, which in the shallow model is another one.
    """
    kept = kept_layers(text_config(config).num_hidden_layers, keep, placement, order)
    try:
        keep_layers_in_config(config, kept)
    except ConfigError as error:
        raise ConfigError(f"model.layers is {keep}: {error}") from error


def shrink_model(
    model: PreTrainedModel, keep: int, placement: Placement | None = None, order: Sequence[int] | None = None
) -> None:
    """Take all layers but `keep` out of a model (DistilBERT's way to make a student, Sanh et al. 2019).

    Its logits are then those of the whole model when it skips the same layers for every column.

    Args:
        model: changed in place, with its config.
        keep: layers that stay.
        placement, order: where they lie, as in `kept_layers`.

    Raises:
        ConfigError: as `shrink_config` does, before anything is changed.
    """
    kept = kept_layers(len(decoder_layers(model)), keep, placement, order)
    try:
        keep_layers(model, kept)
    except ConfigError as error:
        raise ConfigError(f"model.layers is {keep}: {error}") from error
