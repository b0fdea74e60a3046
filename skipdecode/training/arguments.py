"""The arguments of a Trainer that can't be combined with layer skipping, refused before anything is tokenised."""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from skipdecode.errors import ConfigError
from skipdecode.families import text_config
from skipdecode.training.collator import PromptCompletionCollator

_LAYOUT = "layer skipping needs batches with one prompt and one completion a row, padded between them"
_LOSS = "layer skipping computes the loss itself: pass objective=Objective(...)"
# (argument of TrainingArguments or TRL's SFTConfig, the values with which training works, the reason)
_ARGUMENTS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("packing", (False,), _LAYOUT),
    ("eval_packing", (None, False), _LAYOUT),
    ("padding_free", (False,), _LAYOUT),
    ("completion_only_loss", (None, True), "layer skipping trains completions alone, since prompts run other layers"),
    ("use_liger_kernel", (False,), "its fused loss gives no logits, from which layer skipping computes the loss"),
    (
        "torch_compile",
        (False,),
        "it compiles the whole model, anew for each schedule and length; compile its layers instead, with "
        "`for layer in skipdecode.families.decoder_layers(model): layer.compile()`",
    ),
    ("loss_type", ("nll", "chunked_nll"), _LOSS),
    ("label_smoothing_factor", (0,), _LOSS),
)
_PASSED = {
    "compute_loss_func": _LOSS,
    "compute_metrics": "validation gives the loss at each target alone, and no predictions",
    "preprocess_logits_for_metrics": "validation gives the loss at each target alone, and no predictions",
}


def check_arguments(args: Any, collator: Any, passed: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments that break the layout of batches or that would have no effect.

    Args:
        args: the TrainingArguments, or None.
        collator: the `data_collator` that was passed, or None.
        passed: the Trainer's other keyword arguments.
    """
    for name, allowed, reason in _ARGUMENTS:
        value = getattr(args, name, allowed[0])
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}: {reason}")
    for name, reason in _PASSED.items():
        if passed.get(name) is not None:
            raise ConfigError(f"{name} was passed: {reason}")
    if collator is not None and not isinstance(collator, PromptCompletionCollator):
        raise ConfigError(
            f"data_collator is a {type(collator).__name__}: {_LAYOUT}, which PromptCompletionCollator makes; pass none"
        )
    parallel = getattr(args, "parallelism_config", None)
    for name in ("cp_size", "sp_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"parallelism_config.{name} is above 1, which divides sequences: {_LAYOUT}")


def check_layerdrop(config: PretrainedConfig) -> None:
    """Raise ConfigError for a model that skips layers at random while it trains."""
    if rate := getattr(text_config(config), "layerdrop", 0):
        raise ConfigError(
            f"the model's config sets layerdrop to {rate}, which would randomly skip layers that the schedule runs: "
            "set model.config.layerdrop=0"
        )
