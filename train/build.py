"""Making what a recipe names: the model, its tokenizer and its task."""

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
        raise ConfigError("data.options has path: the folder of a task's files is data.path")
    return load_task(recipe.data.task, path=recipe.data.path, **recipe.data.options)


def model_config(recipe: Recipe) -> PretrainedConfig:
    """The config of the recipe's model, without its weights.

    A model that configs/model/ holds the shape of is taken from there, so that nothing is downloaded. The vocabulary of
    a shape's own tokenizer isn't known before the tokenizer is there: it is the most that it may have.
    """
    config = _whole_config(recipe)
    if recipe.model.layers is not None:
        _shrink(config, recipe.model)
    return config


def _shrink(whole: PretrainedConfig | PreTrainedModel, section: ModelSection) -> None:
    """Make a config, or a model, that of the recipe's shallow model. Raises ConfigError as `kept_layers` does."""
    assert section.layers is not None
    depth = text_config(whole.config if isinstance(whole, PreTrainedModel) else whole).num_hidden_layers
    order = None if section.order is None else given_order(section.order, depth, "model.order")
    if isinstance(whole, PreTrainedModel):
        shrink_model(whole, section.layers, section.keep, order)
    else:
        shrink_config(whole, section.layers, section.keep, order)


def _whole_config(recipe: Recipe) -> PretrainedConfig:
    """With all of its layers."""
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
            raise ConfigError(f"model.config.{key} is {changes[key]!r}: set model.dtype in its place")
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
        except Exception as error:  # values of the wrong type raise what huggingface_hub has of its own
            check_trust(name, error)
            raise ConfigError(
                f"model.name_or_path {name!r}: its config.json can't be read: {first_line(error)}"
            ) from error
    try:
        return changed_config(config, changes)
    except ConfigError as error:
        raise ConfigError(f"model.config {changes}: {error}") from error


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Have a model compute its activations again in the backward pass instead of keeping them."""
    # Renamed in transformers 5.23; the old name goes in 6.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def as_it_trains(model: PreTrainedModel, recipe: Recipe) -> Any:
    """A model with adapters around it and activations that are checkpointed, where the recipe says so.

    Raises ConfigError as `add_adapters` does.
    """
    trained = add_adapters(model, recipe.lora)
    if recipe.train.gradient_checkpointing:
        checkpoint_activations(model)
        if recipe.lora.r is not None:
            model.enable_input_require_grads()  # else nothing that is checkpointed has a gradient to carry
    return trained


def build_model(
    recipe: Recipe, examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer of the recipe's model section; random weights follow from `train.seed`.

    A tokenizer that is given is used in place of one that is loaded, or trained on `examples`, which are read for that
    alone. With `model.layers` the model is a shallow one. Raises ConfigError unless exactly one of `model.name_or_path`
    and `model.shape` is given, where neither loads, and for more layers than there are.
    """
    section = recipe.model
    if (section.name_or_path is None) == (section.shape is None):
        raise ConfigError("model needs either name_or_path (pretrained) or shape (random weights), and not both")
    if section.name_or_path is not None:
        return _pretrained(recipe, section.name_or_path, tokenizer)
    model_config(recipe)  # settings that can't be are refused before the data is read
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
            f"model.layers is {section.layers} with lora.merge=false: adapters apart are for the whole model, so "
            "those of a shallow one must be merged"
        )
    changes = _changes(recipe)
    if changes and recipe.lora.r is not None and not recipe.lora.merge:
        raise ConfigError(
            f"model.config is {changes} with lora.merge=false: adapters apart are loaded onto the model as it was, so "
            "those of a changed one must be merged"
        )
    if section.gguf_file is not None and recipe.lora.r is not None and not recipe.lora.merge:
        raise ConfigError(
            f"model.gguf_file is {section.gguf_file!r} with lora.merge=false: adapters apart remember the folder or "
            "Hub name of the model that they are for and not a file in it, so those of a GGUF file must be merged"
        )
    set_seed(recipe.train.seed)
    options: dict[str, Any] = {"gguf_file": section.gguf_file, "trust_remote_code": section.trust_remote_code}
    # Not of adapters apart, which are refused below.
    whole = section.gguf_file is None and (Path(name) / "config.json").is_file()
    config = _pretrained_config(recipe, name, changes) if changes or whole else None
    changed: dict[str, Any] = {"config": config} if changes else {}
    check_readable(recipe)
    # The model first: of code that isn't trusted a tokenizer says less.
    model = load_model(name, getattr(torch, section.dtype), **options, **changed)
    if hasattr(model, "peft_config"):
        raise ConfigError(
            f"model.name_or_path {name!r} holds adapters apart, from which nothing can be trained: merge them into the "
            "weights that they adapt first (lora.merge=true where they are trained)"
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
        model.name_or_path = ""  # it is another model than the one of that name, to which its adapters don't belong
    return model, tokenizer


def _check_vocabulary(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    vocab_size = text_config(config).vocab_size
    if vocab_size < len(tokenizer):
        raise ConfigError(f"vocab_size is {vocab_size}: the tokenizer needs {len(tokenizer)}")


def frozen_teacher(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel | None:
    """The model of `optim.teacher`, which nothing trains; None where the recipe names none.

    Raises ConfigError where it can't be loaded, reads other tokens than the model that is trained, or would be sharded.
    """
    name = recipe.optim.teacher
    if name is None:
        return None
    if is_deepspeed_zero3_enabled():
        raise ConfigError("optim.teacher is given with ZeRO-3, which would shard it: use stage 2, or none")
    trust = recipe.model.trust_remote_code
    try:
        model = load_model(name, getattr(torch, recipe.model.dtype), trust_remote_code=trust)
        own = load_tokenizer(name, trust_remote_code=trust)
    except ConfigError as error:
        raise ConfigError(f"optim.teacher: {error}") from error
    if own.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"optim.teacher {name!r} has another tokenizer ({len(own)} tokens) than the model that is trained "
            f"({len(tokenizer)} tokens): it must read the same tokens"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model
