"""Models in GGUF, llama.cpp's format: the file is found and checked here, transformers makes plain weights of it."""

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
from skipdecode.internals import forget_gguf_title

_MAGIC = b"GGUF"  # what such a file starts with
_PACKAGES = ("gguf", "accelerate")  # that transformers reads it with


def find_gguf(name: str, gguf_file: str, where: Mapping[str, Any] | None = None) -> Path:
    """The GGUF file of a folder, or of a repository of the Hub, from where it is downloaded once.

    Args:
        name: of the folder or repository.
        gguf_file: the file's name in it.
        where: what says where a repository is read, such as `revision` and `cache_dir`.

    Raises:
        ConfigError: where there is no such file, it isn't GGUF, or a package that reads it isn't installed.
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
            raise ConfigError(f"gguf_file {gguf_file!r}: there is no such file in {name!r}, which holds {found}")
    elif looks_local(name):
        raise ConfigError(f"gguf_file {gguf_file!r}: {name!r} is not a folder: name the one that holds the file")
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
    except Exception as error:  # the Hub's client raises errors of its own
        raise ConfigError(f"gguf_file {gguf_file!r} of {name!r} can't be downloaded: {first_line(error)}") from error
    return Path(str(found))


def gguf_files(folder: Path) -> list[str]:
    """The names of a folder's GGUF files."""
    return sorted(file.name for file in folder.glob("*.gguf"))


@contextmanager
def _alone(path: Path) -> Iterator[tuple[str, str]]:
    """What to call transformers with to read a file and nothing that lies beside it: an empty folder, and the path.

    From the file's own folder it would take adapters and parts of a tokenizer. By a relative path it would take one in
    the working directory.
    """
    with tempfile.TemporaryDirectory() as empty:
        yield empty, str(path)


def read_config(path: Path) -> PretrainedConfig:
    """The config that transformers makes of a GGUF file's metadata.

    Raises ConfigError where it can't, as for an architecture that it doesn't read from GGUF.
    """
    try:
        with _alone(path) as (folder, file):
            config: PretrainedConfig = AutoConfig.from_pretrained(folder, gguf_file=file)
    except Exception as error:  # no narrower one: the gguf package raises all kinds for a damaged file
        raise ConfigError(f"{str(path)!r} can't be read by transformers: {first_line(error)}") from error
    forget_gguf_title(config)
    return config


def read_model(
    path: Path, dtype: torch.dtype | None = None, **kwargs: Any
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """The model of a GGUF file, its weights dequantised, and what transformers says about their loading.

    It raises what transformers does.

    Args:
        path: of the file.
        dtype: of the weights; default: float32.
        kwargs: for `AutoModelForCausalLM.from_pretrained`.
    """
    # Unpacked at loading it is a model like any other. transformers would otherwise note that it comes from GGUF and
    # refuse to save it, and keep the weights of some families packed, which can't be trained.
    with _alone(path) as (folder, file):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=file,
            dtype=dtype or torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            **kwargs,
        )
    model, info = loaded
    forget_gguf_title(model.config)
    return model, info


def read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file, padding on the left. It raises what transformers does."""
    with _alone(path) as (folder, file):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, gguf_file=file, padding_side="left")
        if len(tokenizer) == tokenizer.vocab_size:
            return tokenizer
        # Every token of the file is in the vocabulary. transformers adds those that it takes a family to have, such as
        # <|endoftext|>, for which the model has no embedding.
        tokenizer.save_pretrained(folder)
        saved = Path(folder, "tokenizer.json")
        values = json.loads(saved.read_text(encoding="utf-8"))
        values["added_tokens"] = [token for token in values["added_tokens"] if token["id"] < tokenizer.vocab_size]
        saved.write_text(json.dumps(values), encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return tokenizer
