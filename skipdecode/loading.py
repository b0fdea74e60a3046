"""Loading a checkpoint: model, tokenizer and schedules from a folder or the Hub."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Tokenizer, PreTrainedModel, PreTrainedTokenizerBase

from skipdecode.checkpoint import ADAPTERS_FILE, CONFIG_KEY, SkipConfig
from skipdecode.errors import ConfigError, first_line

# What sets OPT's apart from GPT-2's: a text starts with </s>, which ends it too.
OPT_TOKENS: dict[str, Any] = {
    "bos_token": "</s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "add_bos_token": True,
}


def load(name: str, dtype: torch.dtype | None = None, **kwargs: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A checkpoint ready to decode: its model, in evaluation mode, and a tokenizer that pads on the left.

    `model.generate(**tokenizer(prompts, return_tensors="pt", padding=True), custom_generate=skip_generate, speedup=3)`
    decodes with it.

    Args:
        name: a local folder or a repository of the Hub.
        dtype: of the weights; default: as they are stored.
        kwargs: for `AutoModelForCausalLM.from_pretrained`, such as `device_map` or `revision`.

    Raises:
        ConfigError: where there is none, or it can't be loaded.
    """
    model = load_model(name, dtype, **kwargs).eval()
    return model, load_tokenizer(
        name, **{key: kwargs[key] for key in ("revision", "token", "cache_dir") if key in kwargs}
    )


def load_model(name: str, dtype: torch.dtype | None = None, **kwargs: Any) -> PreTrainedModel:
    """A causal language model from a local folder or the Hub, with its adapters where it is a folder of them.

    Raises ConfigError where there is none.
    """
    path = Path(name)
    looks_local = path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
        what = "has no config.json" if path.is_dir() else "is not a folder"
        raise ConfigError(f"{name!r} is no checkpoint: it {what}; name the output folder of a finished run")
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto", **kwargs)
    except Exception as error:  # no narrower one: damaged weights raise what safetensors has of its own
        raise ConfigError(f"{name!r} can't be loaded as a causal language model: {first_line(error)}") from error
    if (path / ADAPTERS_FILE).is_file():  # the model that they adapt may have been trained for something else
        remembered = SkipConfig.load(path)
        assert remembered is not None
        setattr(model.config, CONFIG_KEY, remembered.to_dict())
    return model


def load_tokenizer(name: str, **kwargs: Any) -> PreTrainedTokenizerBase:
    """A tokenizer that pads on the left, as decoding in batches needs. Raises ConfigError where there is none.

    A folder that holds OPT's `vocab.json` and `merges.txt` and nothing that says what they are is read as OPT's.
    """
    try:
        if _is_bare_opt(Path(name)):
            tokenizer: PreTrainedTokenizerBase = GPT2Tokenizer.from_pretrained(name, padding_side="left", **OPT_TOKENS)
        else:
            tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", **kwargs)
    except Exception as error:  # the tokenizers library raises no narrower one for a damaged file
        raise ConfigError(f"{name!r} has no tokenizer that can be loaded: {first_line(error)}") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes one up where there are no files
        raise ConfigError(f"{name!r} has no tokenizer that can be loaded: no file of a vocabulary is there")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {name!r} has no end-of-text token: a completion could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _is_bare_opt(folder: Path) -> bool:
    """Whether a folder's only tokenizer files are a vocabulary that starts as OPT's does, and its merges."""
    if any((folder / file).exists() for file in ("config.json", "tokenizer.json", "tokenizer_config.json")):
        return False
    if not ((folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()):
        return False
    ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    return isinstance(ids, dict) and all(ids.get(token) == n for n, token in enumerate(("<s>", "<pad>", "</s>")))
