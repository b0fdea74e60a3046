"""Loading a checkpoint: model, tokenizer and schedules from a folder or the Hub."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from skipdecode.errors import ConfigError, first_line


def load_model(name: str, dtype: torch.dtype | None = None, **kwargs: Any) -> PreTrainedModel:
    """A causal language model from a local folder or the Hub. Raises ConfigError where there is none."""
    path = Path(name)
    looks_local = path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "is not a folder"
        raise ConfigError(f"{name!r} is no checkpoint: it {what}; name the output folder of a finished run")
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto", **kwargs)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name!r} can't be loaded as a causal language model: {first_line(error)}") from error
    return model


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer that pads on the left, as decoding in batches needs. Raises ConfigError where there is none."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, padding_side="left")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name!r} has no tokenizer that can be loaded: {first_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {name!r} has no end-of-text token: a completion could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
