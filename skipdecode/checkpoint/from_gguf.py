"""Models in GGUF files, llama.cpp's format: this module finds and checks a file, transformers converts its weights."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from skipdecode.checkpoint.offline import looks_local, without_network
from skipdecode.errors import ConfigError, first_line
from skipdecode.internals import drop_gguf_title

_MAGIC = b"GGUF"  # the first bytes of a GGUF file
_PACKAGES = ("gguf", "accelerate")  # what transformers needs to read one


def find_gguf(name: str, gguf_file: str, where: Mapping[str, Any] | None = None) -> Path:
    """The absolute path of a GGUF file in a folder, or downloaded from a repository of the Hub.

    For a repository, `where` has arguments of `from_pretrained` such as `revision`. Raises ConfigError where there is
    no such file, it isn't GGUF, or a package that reads it isn't installed.
    """
    if not isinstance(gguf_file, str) or not gguf_file:
        raise ConfigError(f"gguf_file is {gguf_file!r}: name a file in {name!r}")
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise ConfigError(
                f"gguf_file {gguf_file!r}: reading it needs {package}, which isn't installed: "
                "pip install 'skipdecode[gguf]'"
            )
    folder = Path(name)
    if folder.is_dir():
        path = folder / gguf_file
        if not path.is_file():
            found = ", ".join(gguf_files(folder)) or "no .gguf file"
            raise ConfigError(f"gguf_file {gguf_file!r}: there is no such file in {name!r}, which has {found}")
    elif looks_local(name):
        raise ConfigError(f"gguf_file {gguf_file!r}: {name!r} is not a folder: give the folder of the file")
    else:
        path = _downloaded(name, gguf_file, dict(where or {}))
    try:
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
    except OSError as error:
        raise ConfigError(f"gguf_file {gguf_file!r} of {name!r} can't be read: {first_line(error)}") from error
    if start != _MAGIC:
        raise ConfigError(f"gguf_file {gguf_file!r} of {name!r} isn't GGUF: it starts with {start!r}, not {_MAGIC!r}")
    return path.absolute()


def _downloaded(name: str, gguf_file: str, where: dict[str, Any]) -> Path:
    try:
        found = cached_file(name, gguf_file, **where, **without_network(name, (gguf_file,), **where))
    except ConfigError:
        raise
    except Exception as error:  # the Hub's client raises its own kinds of errors
        raise ConfigError(f"gguf_file {gguf_file!r} of {name!r} can't be downloaded: {first_line(error)}") from error
    return Path(str(found))


def gguf_files(folder: Path) -> list[str]:
    """The names of the GGUF files in a folder."""
    return sorted(file.name for file in folder.glob("*.gguf"))


@contextmanager
def _isolated(path: Path) -> Iterator[tuple[str, str]]:
    """Give the folder (an empty one) and file arguments with which transformers reads nothing but the file `path`.

    From the file's own folder, transformers would also read adapters and tokenizer files.
    """
    with tempfile.TemporaryDirectory() as empty:
        yield empty, str(path)


def read_config(path: Path) -> PretrainedConfig:
    """The config that transformers derives from a GGUF file's metadata.

    Raises ConfigError where it can't, for example for an architecture that it can't read from GGUF.
    """
    try:
        with _isolated(path) as (folder, file):
            config: PretrainedConfig = AutoConfig.from_pretrained(folder, gguf_file=file)
    except Exception as error:  # the gguf package raises errors of many kinds for a damaged file
        raise ConfigError(f"{str(path)!r} can't be read by transformers: {first_line(error)}") from error
    drop_gguf_title(config)
    return config


def read_model(
    path: Path, dtype: torch.dtype | None = None, **kwargs: Any
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """The model of a GGUF file with dequantised weights (default: float32), and transformers' loading info (missing and
    unexpected keys, and so on). It raises transformers' errors.
    """
    # Without `dequantize`, transformers refuses to save the model, and keeps some families' weights quantised, which
    # can't be trained.
    with _isolated(path) as (folder, file):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=file,
            dtype=dtype or torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            **kwargs,
        )
    model, info = loaded
    drop_gguf_title(model.config)
    return model, info


def read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a GGUF file, padding on the left. It raises transformers' errors."""
    with _isolated(path) as (folder, file):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, gguf_file=file, padding_side="left")
        if len(tokenizer) == tokenizer.vocab_size:
            return tokenizer
        # The vocabulary contains every token of the file. transformers adds tokens that it expects of a family, such as
        # <|endoftext|>, for which the model has no embedding; remove them.
        tokenizer.save_pretrained(folder)
        saved = Path(folder, "tokenizer.json")
        values = json.loads(saved.read_text(encoding="utf-8"))
        values["added_tokens"] = [token for token in values["added_tokens"] if token["id"] < tokenizer.vocab_size]
        saved.write_text(json.dumps(values), encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return tokenizer
