"""Models with fewer layers: what is left of one when layers that nothing runs are taken out."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from skipdecode.checkpoint.checksums import seal
from skipdecode.checkpoint.remote_code import write_custom_generate
from skipdecode.checkpoint.skip_config import CONFIG_KEY, SkipConfig, save_default_speedup
from skipdecode.errors import ConfigError
from skipdecode.families import decoder_layers, text_config
from skipdecode.schedule.cost import count_parameters, depth_mismatch
from skipdecode.schedule.schedule import SkipSchedule

# Lists in a config that have a value for each layer, in transformers' configs of decoders.
_PER_LAYER = (
    *("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "layer_rope_theta"),
    *("num_attention_heads_per_layer", "num_key_value_heads_per_layer"),
)


def keep_in_config(config: PretrainedConfig, kept: Sequence[int]) -> None:
    """Make a config that of a model of the layers `kept` alone.

    Raises ConfigError where a layer computes by its number, which would be another one.
    """
    text: Any = text_config(config)
    if getattr(text, "scale_attn_by_inverse_layer_idx", False):  # GPT-2
        raise ConfigError(
            "this model's layers scale attention by their number (scale_attn_by_inverse_layer_idx), so none can be "
            "left out"
        )
    cut: dict[str, Any] = {}
    for name in _PER_LAYER:
        values = getattr(text, name, None)
        if values is not None:
            cut[name] = [values[layer] for layer in kept]
    if getattr(text, "max_window_layers", None) is not None:  # Qwen: of the layers before it none has a window
        cut["max_window_layers"] = sum(layer < text.max_window_layers for layer in kept)
    text.num_hidden_layers = len(kept)  # whatever the family calls it: configs map the name
    for name, values in cut.items():
        setattr(text, name, values)


def keep_layers(model: PreTrainedModel, kept: Sequence[int]) -> None:
    """Take all layers but `kept` out of a model.

    Its logits are then those of the whole model when it skips the same layers for every column.

    Args:
        model: changed in place, with its config.
        kept: layers that stay, ascending, from 0.

    Raises:
        ConfigError: as `keep_in_config` does, before anything is changed.
    """
    layers = decoder_layers(model)
    keep_in_config(model.config, kept)
    for index in reversed(range(len(layers))):
        if index not in kept:
            del layers[index]
    for number, layer in enumerate(layers):
        numbered: list[Any] = [module for module in layer.modules() if hasattr(module, "layer_idx")]
        for module in numbered:
            module.layer_idx = number  # where its keys and values are in a cache


def pruned_schedule(schedule: SkipSchedule) -> tuple[tuple[int, ...], SkipSchedule]:
    """The layers that a schedule ever runs, and the schedule that runs the same ones where no others are.

    Raises ConfigError where prompts run all layers, so that none can go, and where the placement spreads layers by the
    depth of the whole model, so that no schedule of the smaller one runs the same.
    """
    kept = schedule.prompt_layers  # law 1: every later set is in it
    if len(kept) == schedule.num_layers and schedule.max_layers < schedule.num_layers:
        raise ConfigError(
            f"prompts run all {schedule.num_layers} layers under this schedule, so that none can be dropped: "
            "train with schedule.prompt=max"
        )
    stop = schedule.prompt_stop if schedule.stopped_layers else None
    order = schedule.order
    if order is not None:  # the same layers by their new numbers
        order = tuple(kept.index(layer) for layer in order if layer in kept)
    smaller = replace(schedule, num_layers=len(kept), prompt_stop=stop, order=order)
    for budget in (*range(schedule.min_layers, schedule.max_layers + 1), schedule.prompt_budget):
        if tuple(kept[n] for n in smaller.layers_for(budget)) != schedule.layers_for(budget):
            raise ConfigError(
                f"placement is {schedule.placement!r}, whose {budget} layers of {schedule.num_layers} are no set of "
                f"the same placement in a model of {len(kept)}: its layers can't be dropped"
            )
    return kept, smaller


def standalone_layers(schedule: SkipSchedule) -> tuple[int, ...]:
    """The layers that every token runs under a schedule, the prompt's and generated ones: those of a plain model.

    Raises ConfigError where tokens run different ones.

    >>> standalone_layers(SkipSchedule(12, 4, 4, prompt="max"))
    (0, 9, 10, 11)
    """
    if schedule.stopped_layers:
        raise ConfigError(
            f"a standalone checkpoint runs the same layers for every token: under this schedule prompts stop after "
            f"{schedule.prompt_depth} (prompt_stop); train with schedule.prompt_stop=null"
        )
    most, least, prompt = schedule.budget(0), schedule.min_layers, schedule.prompt_budget
    if prompt != least:
        generated = f"{most}" if most == least else f"{most} to {least}"
        raise ConfigError(
            f"a standalone checkpoint runs the same layers for every token: under this schedule prompts run {prompt} "
            f"of {schedule.num_layers} and generated tokens {generated}; train with schedule.decay=constant and "
            "schedule.prompt=max"
        )
    return schedule.prompt_layers


@dataclass(frozen=True)
class Exported:
    """The savings of an export.

    Attributes:
        layers, layers_before: of the model.
        parameters, parameters_before: of all weights.
        schedule: of the exported checkpoint.
    """

    layers: int
    layers_before: int
    parameters: int
    parameters_before: int
    schedule: SkipSchedule


def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    schedule: SkipSchedule,
    speedup: float,
    folder: str | os.PathLike[str],
    *,
    standalone: bool = False,
) -> Exported:
    """Write a checkpoint that decodes under one schedule alone, without the layers that it never runs.

    It decodes the same tokens as the whole checkpoint under the schedule. The folder appears whole or not at all.

    Args:
        model: loses those layers.
        tokenizer: saved beside it.
        schedule: of the whole model.
        speedup: that the exported checkpoint has the schedule for.
        folder: new, or empty.
        standalone: write a plain model of fewer layers, which any engine runs as it runs every other of its family:
            without schedules and without code. Every token, the prompt's too, must run the same layers.

    Raises:
        ConfigError: where no layer can go (`pruned_schedule`, `keep_in_config`), where tokens run different ones of a
            standalone model's (`standalone_layers`), for adapters apart, and for a folder that holds something or
            has no name of its own.
    """
    folder = Path(folder)
    if not folder.name:  # of "" and ".", which can't be replaced either
        raise ConfigError(f"the folder is {str(folder)!r}: name a new folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} isn't empty: name a new folder")
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "its adapters lie apart from the model's weights: merge them (lora.merge=true) and export that"
        )
    before = count_parameters(model.parameters())
    depth = len(decoder_layers(model))
    if schedule.num_layers != depth:
        raise ConfigError(depth_mismatch(schedule, depth))
    if standalone:
        kept = standalone_layers(schedule)
        smaller = SkipSchedule.full_depth(len(kept))
    else:
        kept, smaller = pruned_schedule(schedule)
    keep_layers(model, kept)
    remembered = SkipConfig.of(model.config) or SkipConfig()
    if standalone and hasattr(model.config, CONFIG_KEY):
        delattr(model.config, CONFIG_KEY)
    partial = folder.with_name(f"{folder.name}.{uuid4().hex[:8]}.partial")
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        save_default_speedup(partial, None if standalone else speedup)
        if not standalone:
            # Without settings to solve others by: those would be over the full depth of this model, which is none.
            replace(remembered, schedules={speedup: smaller}, solver={}).save(partial)
            write_custom_generate(partial)
        seal(partial)
        if folder.exists():
            folder.rmdir()
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(len(kept), depth, count_parameters(model.parameters()), before, smaller)
