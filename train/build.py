"""Building what a recipe names: the model, its tokenizer and its task."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.integrations import is_deepspeed_zero3_enabled

from configs.shapes import SHAPES, changed_config, random_model, read_shape, shape_config
from data import Example, Task, load_task
from data.vocabulary import train_tokenizer
from skipdecode import ConfigError
from skipdecode.checkpoint.four_bit import nf4
from skipdecode.checkpoint.from_gguf import find_gguf, read_config
from skipdecode.checkpoint.loading import check_trust, load_model, load_tokenizer
from skipdecode.checkpoint.offline import without_network
from skipdecode.errors import first_line
from skipdecode.families import text_config
from train.adapters import add_adapters
from train.base_settings import check_readable
from train.layer_order import given_order
from train.recipe import ModelSection, Recipe
from train.shallow import shrink_config, shrink_model


def build_task(recipe: Recipe) -> Task:
    """The task of the recipe's data section."""
    if "path" in recipe.data.options:
        raise ConfigError("data.options has the key path: set the folder of the task's files as data.path")
    return load_task(recipe.data.task, path=recipe.data.path, **recipe.data.options)


def model_config(recipe: Recipe) -> PretrainedConfig:
    """The config of the recipe's model, without loading weights.

    If configs/model/ has the shape of a pretrained model, it is used and nothing is downloaded. Where a tokenizer is
    yet to be trained for a shape, the vocabulary has its maximum size, `model.vocab_size`.
    """
    config = _config_of_all_layers(recipe)
    if recipe.model.layers is not None:
        _shrink(config, recipe.model)
    return config


def _shrink(whole: PretrainedConfig | PreTrainedModel, section: ModelSection) -> None:
    """Reduce a config or a model, in place, to the recipe's shallow model. Raises ConfigError as `kept_layers` does."""
    assert section.layers is not None
    depth = text_config(whole.config if isinstance(whole, PreTrainedModel) else whole).num_hidden_layers
    order = None if section.order is None else given_order(section.order, depth, "model.order")
    if isinstance(whole, PreTrainedModel):
        shrink_model(whole, section.layers, section.keep, order)
    else:
        shrink_config(whole, section.layers, section.keep, order)


def _config_of_all_layers(recipe: Recipe) -> PretrainedConfig:
    section = recipe.model
    name = section.name_or_path or section.shape or ""
    known = section.shape or Path(name).name
    changes = _changes(recipe)
    there = section.gguf_file is not None or (Path(name) / "config.json").is_file()
    if section.shape is None and (there or not (SHAPES / f"{known}.yaml").is_file()):
        return _pretrained_config(recipe, name, changes)
    shape = {**read_shape(known, "model.shape"), **changes}
    if section.shape is not None and section.tokenizer is None:
        shape.setdefault("vocab_size", section.vocab_size)
    try:
        return shape_config(shape)
    except ConfigError as error:
        raise ConfigError(f"model.shape {known!r} with model.config {changes}: {error}") from error


def _changes(recipe: Recipe) -> dict[str, Any]:
    changes = recipe.model.config or {}
    for key in ("dtype", "torch_dtype"):
        if key in changes:
            raise ConfigError(f"model.config.{key} is {changes[key]!r}: set model.dtype instead")
    return changes


def _pretrained_config(recipe: Recipe, name: str, changes: dict[str, Any]) -> PretrainedConfig:
    section = recipe.model
    if section.gguf_file is not None:
        config = read_config(find_gguf(name, section.gguf_file))
    else:
        try:
            config = AutoConfig.from_pretrained(
                name, trust_remote_code=section.trust_remote_code, **without_network(name)
            )
        except Exception as error:  # values of a wrong type raise huggingface_hub's own errors
            check_trust(name, error)
            raise ConfigError(
                f"model.name_or_path {name!r}: its config.json can't be read: {first_line(error)}"
            ) from error
    try:
        return changed_config(config, changes)
    except ConfigError as error:
        raise ConfigError(f"model.config {changes}: {error}") from error


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Make a model recompute its activations in the backward pass instead of storing them."""
    # Renamed in transformers 5.23; the old name goes in 6.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def as_it_trains(model: PreTrainedModel, recipe: Recipe) -> Any:
    """The model with adapters and activation checkpointing, as the recipe sets them.

    Raises ConfigError as `add_adapters` does.
    """
    trained = add_adapters(model, recipe.lora)
    if recipe.train.gradient_checkpointing:
        checkpoint_activations(model)
        if recipe.lora.r is not None:
            model.enable_input_require_grads()  # without it, checkpointed layers get no gradient
    return trained


def build_model(
    recipe: Recipe, examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer of the recipe's model section.

    Args:
        recipe: the recipe; random weights follow from its `train.seed`, and `model.layers` makes the model shallow.
        examples: examples on which a tokenizer is trained, where a shape names none; read only for that.
        tokenizer: a tokenizer to use; None: it is loaded or trained.

    Raises:
        ConfigError: unless exactly one of `model.name_or_path` and `model.shape` is given; for a model that can't be
            loaded or built; and for more layers than it has.
    """
    section = recipe.model
    if (section.name_or_path is None) == (section.shape is None):
        raise ConfigError("set either model.name_or_path (pretrained) or model.shape (random weights), and not both")
    if section.name_or_path is not None:
        return _pretrained(recipe, section.name_or_path, tokenizer)
    model_config(recipe)  # reports impossible settings before the data is read
    set_seed(recipe.train.seed)
    shape = {**read_shape(section.shape or "", "model.shape"), **(section.config or {})}
    positions = shape.get("max_position_embeddings", 2048)
    if tokenizer is not None:
        pass
    elif section.tokenizer is not None:
        tokenizer = load_tokenizer(section.tokenizer, trust_remote_code=section.trust_remote_code)
    else:
        tokenizer = train_tokenizer(examples, section.vocab_size, positions)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    try:
        config = shape_config({"vocab_size": len(tokenizer), **special, **shape})
        _check_vocabulary(config, tokenizer)
        if section.layers is not None:
            _shrink(config, section)
        return random_model(config, getattr(torch, section.dtype)), tokenizer
    except ConfigError as error:
        raise ConfigError(f"model.shape {section.shape!r}: {error}") from error


def _pretrained(
    recipe: Recipe, name: str, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    section = recipe.model
    if section.layers is not None and recipe.lora.r is not None and not recipe.lora.merge:
        raise ConfigError(
            f"model.layers is {section.layers} with lora.merge=false: unmerged adapters would be loaded onto the model "
            "with all of its layers; set lora.merge=true"
        )
    changes = _changes(recipe)
    if changes and recipe.lora.r is not None and not recipe.lora.merge:
        raise ConfigError(
            f"model.config is {changes} with lora.merge=false: unmerged adapters would be loaded onto the model "
            "without these changes; set lora.merge=true"
        )
    if section.gguf_file is not None and recipe.lora.r is not None and not recipe.lora.merge:
        raise ConfigError(
            f"model.gguf_file is {section.gguf_file!r} with lora.merge=false: unmerged adapters save the name of their "
            "base model, but no GGUF file in it; set lora.merge=true"
        )
    dtype = getattr(torch, section.dtype)
    quantised = _quantisation(section, dtype)
    set_seed(recipe.train.seed)
    options: dict[str, Any] = {"gguf_file": section.gguf_file, "trust_remote_code": section.trust_remote_code}
    # A folder of adapters has no config.json; it is refused below.
    has_config = section.gguf_file is None and (Path(name) / "config.json").is_file()
    config = _pretrained_config(recipe, name, changes) if changes or has_config else None
    changed: dict[str, Any] = {"config": config} if changes else {}
    check_readable(recipe)
    # The model is loaded before the tokenizer, whose error for code that isn't trusted says less.
    model = load_model(name, dtype, **options, **changed, **quantised)
    if hasattr(model, "peft_config"):
        raise ConfigError(
            f"model.name_or_path {name!r} holds unmerged adapters, which can't be trained further: merge them into "
            "their base model first (train them with lora.merge=true)"
        )
    if tokenizer is None and section.tokenizer is not None:
        options["gguf_file"] = None
    tokenizer = tokenizer or load_tokenizer(section.tokenizer or name, **options)
    try:
        _check_vocabulary(model.config, tokenizer)
    except ConfigError as error:
        raise ConfigError(f"model.name_or_path {name!r}: {error}") from error
    if section.layers is not None:
        _shrink(model, section)
    if section.layers is not None or changes or section.gguf_file is not None:
        model.name_or_path = ""  # adapters of the changed model don't fit the model of that name
    return model, tokenizer


def _quantisation(section: ModelSection, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of `load_model` for a base in 4 bits. Raises ConfigError where it can't be had."""
    if section.quantize is None:
        return {}
    if section.gguf_file is not None:
        raise ConfigError(
            f"model.quantize is {section.quantize!r} with model.gguf_file {section.gguf_file!r}, whose weights are "
            "dequantised: set only one of them"
        )
    if is_deepspeed_zero3_enabled():
        raise ConfigError(
            f"model.quantize is {section.quantize!r} with ZeRO-3, which can't shard weights in 4 bits: use stage 2 at "
            "most"
        )
    return {"quantization_config": nf4(dtype)}


def _check_vocabulary(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    vocab_size = text_config(config).vocab_size
    if vocab_size < len(tokenizer):
        raise ConfigError(f"vocab_size is {vocab_size}: the tokenizer has {len(tokenizer)} tokens")


def frozen_teacher(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel | None:
    """The frozen model of `optim.teacher`; None where the recipe names none.

    Raises ConfigError where it can't be loaded, has another vocabulary than the trained model, or would be sharded.
    """
    name = recipe.optim.teacher
    if name is None:
        return None
    if is_deepspeed_zero3_enabled():
        raise ConfigError("optim.teacher is set with ZeRO-3, which would shard the teacher: use stage 2 at most")
    trust = recipe.model.trust_remote_code
    try:
        model = load_model(name, getattr(torch, recipe.model.dtype), trust_remote_code=trust)
        own = load_tokenizer(name, trust_remote_code=trust)
    except ConfigError as error:
        raise ConfigError(f"optim.teacher: {error}") from error
    if own.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"optim.teacher {name!r} has another vocabulary ({len(own)} tokens) than the trained model "
            f"({len(tokenizer)} tokens): both must be the same"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model
