"""Export of a checkpoint for one schedule, without the layers that this schedule never runs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from skipdecode.checkpoint.checksums import write_checksums
from skipdecode.checkpoint.remote_code import write_custom_generate
from skipdecode.checkpoint.skip_config import CONFIG_KEY, SkipConfig, save_default_speedup
from skipdecode.errors import ConfigError
from skipdecode.families import decoder_layers, text_config
from skipdecode.files import atomic_folder_replacement
from skipdecode.schedule.cost import count_parameters, depth_mismatch
from skipdecode.schedule.schedule import SkipSchedule

# The fields of transformers' decoder configs that are lists with one value per layer.
_PER_LAYER = (
    *("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "layer_rope_theta"),
    *("num_attention_heads_per_layer", "num_key_value_heads_per_layer"),
)


def keep_layers_in_config(config: PretrainedConfig, kept: Sequence[int]) -> None:
    """Change a config, in place, to that of a model with only the layers `kept`.

    Raises ConfigError where a layer's computation depends on its index, which would change.
    """
    text: Any = text_config(config)
    if getattr(text, "scale_attn_by_inverse_layer_idx", False):  # GPT-2
        raise ConfigError(
            "this model's layers scale attention by their index (scale_attn_by_inverse_layer_idx), so no layer can be "
            "removed"
        )
    cut: dict[str, Any] = {}
    for name in _PER_LAYER:
        values = getattr(text, name, None)
        if values is not None:
            cut[name] = [values[layer] for layer in kept]
    if getattr(text, "max_window_layers", None) is not None:  # Qwen: the layers below it have no sliding window
        cut["max_window_layers"] = sum(layer < text.max_window_layers for layer in kept)
    text.num_hidden_layers = len(kept)  # each config maps this name to its family's own
    for name, values in cut.items():
        setattr(text, name, values)


def keep_layers(model: PreTrainedModel, kept: Sequence[int]) -> None:
    """Remove all layers of a model except `kept` (ascending), in place, and change its config.

    Its logits are then those of the complete model when every position skips the removed layers. Raises ConfigError as
    `keep_layers_in_config`, before anything is changed.
    """
    layers = decoder_layers(model)
    keep_layers_in_config(model.config, kept)
    for index in reversed(range(len(layers))):
        if index not in kept:
            del layers[index]
    for number, layer in enumerate(layers):
        numbered: list[Any] = [module for module in layer.modules() if hasattr(module, "layer_idx")]
        for module in numbered:
            module.layer_idx = number  # the index of its keys and values in a cache


def pruned_schedule(schedule: SkipSchedule) -> tuple[tuple[int, ...], SkipSchedule]:
    """The layers that a schedule runs at all, and the schedule that runs the same ones in a model of only these.

    Raises:
        ConfigError: where prompts run all layers, so that none can be removed; where the placement depends on the
            number of layers, so that no schedule of the smaller model runs the same ones.
    """
    kept = schedule.prompt_layers  # generated tokens run subsets of these
    if len(kept) == schedule.num_layers and schedule.max_layers < schedule.num_layers:
        raise ConfigError(
            f"prompts run all {schedule.num_layers} layers under this schedule, so no layer can be removed: "
            "train with schedule.prompt=max"
        )
    stop = schedule.prompt_stop if schedule.stopped_layers else None
    order = schedule.order
    if order is not None:  # the same layers by their new indices
        order = tuple(kept.index(layer) for layer in order if layer in kept)
    smaller = replace(schedule, num_layers=len(kept), prompt_stop=stop, order=order)
    for budget in (*range(schedule.min_layers, schedule.max_layers + 1), schedule.prompt_budget):
        if tuple(kept[n] for n in smaller.layers_for(budget)) != schedule.layers_for(budget):
            raise ConfigError(
                f"placement is {schedule.placement!r}: its {budget} layers of {schedule.num_layers} differ from those "
                f"that it chooses in a model of {len(kept)} layers, so layers can't be removed"
            )
    return kept, smaller


def standalone_layers(schedule: SkipSchedule) -> tuple[int, ...]:
    """The layers that all tokens, of the prompt and generated, run under a schedule: those of a standalone model.

    Raises ConfigError where some tokens run different layers.

    >>> standalone_layers(SkipSchedule(12, 4, 4, prompt="max"))
    (0, 9, 10, 11)
    """
    if schedule.stopped_layers:
        raise ConfigError(
            f"a standalone checkpoint runs the same layers for every token, but under this schedule prompts stop after "
            f"{schedule.prompt_depth} layers (prompt_stop): train with schedule.prompt_stop=null"
        )
    first, last, prompt = schedule.budget(0), schedule.min_layers, schedule.prompt_budget
    if prompt != last:
        generated = f"{first}" if first == last else f"{first} to {last}"
        raise ConfigError(
            f"a standalone checkpoint runs the same layers for every token, but under this schedule prompts run "
            f"{prompt} of {schedule.num_layers} layers and generated tokens {generated}: train with "
            "schedule.decay=constant and schedule.prompt=max"
        )
    return schedule.prompt_layers


@dataclass(frozen=True)
class Exported:
    """The numbers of layers and parameters of a model after and before its export, and the exported schedule."""

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
    """Write a checkpoint that decodes with one schedule only, without the layers that the schedule never runs.

    It generates the same tokens as the complete checkpoint with this schedule. The folder is written atomically.

    Args:
        model: the complete model, whose unused layers are removed in place.
        tokenizer: the tokenizer to save with it.
        schedule: a schedule of the complete model.
        speedup: the speedup under which the exported checkpoint stores the schedule.
        folder: a new or empty folder.
        standalone: write a plain model of fewer layers, without schedules and code, that any inference engine can run.
            Every token, also of the prompt, must run the same layers.

    Returns:
        The sizes before and after.

    Raises:
        ConfigError: where no layer can be removed (`pruned_schedule`, `keep_layers_in_config`), where tokens run
            different layers and the model is to be standalone (`standalone_layers`), for adapters that aren't merged,
            and for a folder that isn't empty or is ".".
    """
    folder = Path(folder)
    if not folder.name:  # "" and ".", which os.replace can't replace
        raise ConfigError(f"the folder is {str(folder)!r}: name a new folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} isn't empty: name a new folder")
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "the model's adapters aren't merged into its weights: merge them (lora.merge=true) and export the result"
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
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder_replacement(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        save_default_speedup(partial, None if standalone else speedup)
        if not standalone:
            # No solver settings: other speedups would be relative to this model's depth instead of the complete one's.
            replace(remembered, schedules={speedup: smaller}, solver={}).save(partial)
            write_custom_generate(partial)
        write_checksums(partial)
    return Exported(len(kept), depth, count_parameters(model.parameters()), before, smaller)
