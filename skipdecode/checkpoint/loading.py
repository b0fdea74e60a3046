"""Loading a checkpoint: model, tokenizer and schedules from a folder or the Hub."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Tokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file, logging

from skipdecode.checkpoint.checksums import SEAL, check_seal
from skipdecode.checkpoint.from_gguf import find_gguf, gguf_files, read_model, read_tokenizer
from skipdecode.checkpoint.offline import looks_local, without_network
from skipdecode.checkpoint.skip_config import ADAPTERS_FILE, CONFIG_KEY, SkipConfig
from skipdecode.errors import ConfigError, first_line
from skipdecode.families import text_config

_ADAPTERS_CONFIG = "adapter_config.json"
_WHERE = ("revision", "token", "cache_dir", "local_files_only")  # arguments that say where a repository is read

# What sets OPT's apart from GPT-2's: a text starts with </s>, which ends it too.
OPT_TOKENS: dict[str, Any] = {
    "bos_token": "</s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "add_bos_token": True,
}


def load(
    name: str,
    dtype: torch.dtype | None = None,
    *,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A checkpoint ready to decode: its model, in evaluation mode, and a tokenizer that pads on the left.

    `model.generate(**tokenizer(prompts, return_tensors="pt", padding=True), custom_generate=skip_generate, speedup=3)`
    decodes with it.

    Args:
        name: a local folder or a repository of the Hub.
        dtype: of the weights; default: as they are stored, and float32 from GGUF.
        gguf_file: a GGUF file in that folder or repository, to read model and tokenizer from in place of everything
            else in it (needs `pip install 'skipdecode[gguf]'`). Its weights are dequantised.
        trust_remote_code: whether Python code that it brings may run; without, one that needs to is refused.
        kwargs: for `AutoModelForCausalLM.from_pretrained`, such as `device_map` or `revision`.

    Raises:
        ConfigError: where there is none, it can't be loaded, or it is damaged, as `load_model` says.
    """
    options: dict[str, Any] = {"gguf_file": gguf_file, "trust_remote_code": trust_remote_code}
    model = load_model(name, dtype, **options, **kwargs).eval()
    model.config.return_dict = text_config(model.config).return_dict = True  # else nothing finds its logits
    where = {key: kwargs[key] for key in _WHERE if key in kwargs}
    return model, load_tokenizer(name, **options, **where)


def load_model(
    name: str,
    dtype: torch.dtype | None = None,
    *,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> PreTrainedModel:
    """A causal language model from a local folder or the Hub, with its adapters where it is a folder of them.

    A sealed folder's files are read once more, to compare them with what was written
    (`skipdecode.checkpoint.checksums`). In every folder the weights must be safetensors, of the config's names and
    shapes, all there, and finite: a pass over the loaded weights, about as long as a decode step at full depth.

    Raises:
        ConfigError: where there is none, or that isn't so; where it brings code of its own and isn't trusted.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"the checkpoint's name is {name!r}: name a folder, or a repository of the Hub")
    if gguf_file is not None:
        return _load_gguf(name, gguf_file, dtype, kwargs)
    path, local = Path(name), looks_local(name)
    if local and not any((path / file).is_file() for file in ("config.json", _ADAPTERS_CONFIG)):
        raise _no_checkpoint(name, path)
    if local:
        _check_files(path)
    else:
        kwargs |= without_network(name, **{key: kwargs[key] for key in _WHERE if key in kwargs})
    options = {"dtype": dtype or "auto", "trust_remote_code": trust_remote_code, "use_safetensors": True, **kwargs}
    options["ignore_mismatched_sizes"] = True  # they are listed then, and refused below
    if kwargs.get("local_files_only"):
        options["adapter_kwargs"] = {"local_files_only": True, **kwargs.get("adapter_kwargs", {})}
    adapted = adapted_checkpoint(path) if local else None
    if adapted is not None:
        model = load_model(adapted, dtype, trust_remote_code=trust_remote_code, **kwargs)
        info = _quietly(name, lambda: model.load_adapter(str(path), use_safetensors=True).to_dict())
    else:
        with _Unfilled():
            model, info = _quietly(
                name, lambda: AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **options)
            )
    remembers = path / ADAPTERS_FILE if local else None
    if not local:
        if hasattr(model, "peft_config"):
            remembers = downloaded(name, ADAPTERS_FILE, kwargs)
        _check_download(name, kwargs)
    _check_weights(name, model, info, adapted)
    # With trust_remote_code transformers puts a checkpoint's custom_generate in its place: ours calls the class's own.
    model.__dict__.pop("generate", None)
    if remembers is not None and remembers.is_file():  # the model that they adapt may be trained for something else
        remembered = SkipConfig.load(remembers.parent)
        assert remembered is not None
        setattr(model.config, CONFIG_KEY, remembered.to_dict())
    return model


def _no_checkpoint(name: str, path: Path) -> ConfigError:
    found = gguf_files(path if path.is_dir() else path.parent)
    ways = "--gguf-file (in a recipe model.gguf_file, in Python gguf_file)"
    if path.is_file() and path.name in found:
        return ConfigError(f"{name!r} is no checkpoint, but a GGUF file: name its folder, and the file with {ways}")
    if path.is_dir() and found:
        return ConfigError(
            f"{name!r} is no checkpoint: it has no config.json; its GGUF file {found[0]} is read with {ways}"
        )
    what = "has no config.json" if path.is_dir() else "is not a folder"
    return ConfigError(f"{name!r} is no checkpoint: it {what}; name the output folder of a finished run")


def _load_gguf(name: str, gguf_file: str, dtype: torch.dtype | None, kwargs: Mapping[str, Any]) -> PreTrainedModel:
    """The model of a GGUF file, as `load_model` gives it."""
    path = find_gguf(name, gguf_file, {key: kwargs[key] for key in _WHERE if key in kwargs})
    options = {key: value for key, value in kwargs.items() if key not in _WHERE}
    model: PreTrainedModel
    with _Unfilled():
        model, info = _quietly(str(path), lambda: read_model(path, dtype, ignore_mismatched_sizes=True, **options))
    _check_weights(str(path), model, info, None)
    model.name_or_path = model.config.name_or_path = name
    return model


def _quietly(name: str, read: Callable[[], Any]) -> Any:
    """Call `read` without transformers' own table of what is wrong. Raises ConfigError where it fails."""
    try:
        with warnings_off():
            return read()
    except ConfigError:
        raise
    except Exception as error:  # no narrower one: damaged weights raise what safetensors has of its own
        check_trust(name, error)
        if "use_safetensors" in str(error):  # a repository of the Hub without them
            raise _pickled(name) from error
        raise ConfigError(f"{name!r} can't be loaded as a causal language model: {first_line(error)}") from error


class _Unfilled(TorchFunctionMode):
    """Leave out the random numbers that modules are made with: weights that are read take their place, all of them, and
    on the meta device, where transformers makes modules, each takes a tour through torch's decompositions and sympy.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def warnings_off() -> Iterator[None]:
    """Silence transformers while it loads: its warnings would come before the one line that says what is wrong."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _pickled(name: str) -> ConfigError:
    return ConfigError(
        f"{name!r} holds its weights as pickles (.bin), which can run code as they are read: where you trust them, "
        "convert them by transformers' AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(FOLDER), and take "
        "the tokenizer along"
    )


def check_trust(name: str, error: BaseException) -> None:
    """Raise ConfigError where transformers' error says that a checkpoint's own code would have to run."""
    if "trust_remote_code" in str(error):
        raise ConfigError(
            f"{name!r} brings Python code that must run to load it: read that code first, and then say "
            "--trust-remote-code (in a recipe model.trust_remote_code=true, in Python trust_remote_code=True)"
        ) from error


def _check_files(folder: Path) -> None:
    """Check what can be told of a folder before its weights are read."""
    check_seal(folder)
    for index in folder.glob("*.safetensors.index.json"):
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            outside = [shard for shard in shards if Path(shard).name != shard]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is damaged ({type(error).__name__}: {error})") from error
        if outside:
            raise ConfigError(f"{index} names {outside[0]!r}: weights lie in the folder itself")
    pickled = sorted(file.name for file in folder.glob("*.bin") if file.name.startswith(("pytorch_", "adapter_")))
    if pickled and not any(folder.glob("*.safetensors")):
        raise _pickled(str(folder))


def adapted_checkpoint(folder: Path) -> str | None:
    """The checkpoint that a folder of adapters is for, or None of another. Raises ConfigError where it isn't said."""
    file = folder / _ADAPTERS_CONFIG
    if (folder / "config.json").is_file() or not file.is_file():
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is damaged ({type(error).__name__}: {error})") from error
    if not base:
        raise ConfigError(
            f"{file} names no model that its adapters are for (base_model_name_or_path): it had random weights, or was "
            "changed for its training (model.layers, model.config); load the finished run, into which they are merged"
        )
    if not isinstance(base, str) or (Path(base) / _ADAPTERS_CONFIG).is_file():
        raise ConfigError(f"{file}: base_model_name_or_path is {base!r}: expected a whole model's folder or Hub name")
    return base


def downloaded(name: str, file: str, where: Mapping[str, Any]) -> Path | None:
    """A file of a Hub repository; None where there is none, or nobody is there to ask."""
    try:
        return Path(str(cached_file(name, file, **{key: where[key] for key in _WHERE if key in where})))
    except OSError:
        return None


def _check_download(name: str, where: Mapping[str, Any]) -> None:
    """Check the files of a Hub repository that are here, where it is sealed."""
    sealed = downloaded(name, SEAL, where)
    if sealed is not None:
        check_seal(sealed.parent, partly_here=True)


def _check_weights(name: str, model: PreTrainedModel, info: Mapping[str, Any], adapted: str | None) -> None:
    missing, left = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    names = model.state_dict().keys()
    deeper = [key for key in left if re.sub(r"\.\d+\.", ".0.", key, count=1) in names]
    if missing:
        instead = f", and holds {left[0]} instead" if left else ""
        raise ConfigError(
            f"{name!r} lacks {len(missing)} of its weights, such as {missing[0]}{instead}: "
            + (
                "take a good copy of it"
                if adapted is None
                else f"they are no adapters of {adapted}, but perhaps of some of its layers (model.layers), or damaged"
            )
        )
    if info["mismatched_keys"]:
        key, found, expected = min(info["mismatched_keys"])
        raise ConfigError(
            f"{name!r} holds {key} of shape {tuple(found)} where its config.json says {tuple(expected)}: take a good "
            "copy of it"
        )
    if deeper:
        raise ConfigError(
            f"{name!r} holds layers that its config.json has not, such as {deeper[0]}: take a good copy of it"
        )
    for parameter, tensor in model.named_parameters():
        values = getattr(tensor, "ds_tensor", tensor).detach()  # of ZeRO-3: this process's part
        if values.numel() == 0 or values.is_meta or not values.is_floating_point():
            continue
        least, most = torch.aminmax(values.float() if values.dtype.itemsize == 1 else values)
        if not (torch.isfinite(least) and torch.isfinite(most)):
            raise ConfigError(
                f"{name!r} holds numbers in {parameter} that are infinite or none at all ({values.dtype}): "
                "take a good copy of it"
            )


def load_tokenizer(
    name: str, *, gguf_file: str | None = None, trust_remote_code: bool = False, **kwargs: Any
) -> PreTrainedTokenizerBase:
    """A tokenizer that pads on the left, as decoding in batches needs; with `gguf_file`, that of a GGUF file.

    Raises ConfigError where there is none, it is damaged, or it brings code of its own and isn't trusted.

    A folder that holds OPT's `vocab.json` and `merges.txt` and nothing that says what they are is read as OPT's.
    """
    path = None if gguf_file is None else find_gguf(name, gguf_file, kwargs)
    what = name if path is None else str(path)
    if path is None and Path(name).is_dir():
        check_seal(Path(name))
    try:
        if path is not None:
            with warnings_off():
                tokenizer = read_tokenizer(path)
            tokenizer.name_or_path = name
        elif _is_bare_opt(Path(name)):
            tokenizer = GPT2Tokenizer.from_pretrained(name, padding_side="left", **OPT_TOKENS)
        else:
            kwargs |= without_network(name, **kwargs)
            options = {"padding_side": "left", "trust_remote_code": trust_remote_code, **kwargs}
            with warnings_off():
                tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # the tokenizers library raises no narrower one for a damaged file
        check_trust(what, error)
        raise ConfigError(f"{what!r} has no tokenizer that can be loaded: {first_line(error)}") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes one up where there are no files
        raise ConfigError(f"{what!r} has no tokenizer that can be loaded: no file of a vocabulary is there")
    if path is None and not Path(name).is_dir():
        _check_download(name, kwargs)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {what!r} has no end-of-text token: a completion could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _is_bare_opt(folder: Path) -> bool:
    """True where a folder's only tokenizer files are a vocabulary that starts as OPT's does, and its merges."""
    if any((folder / file).exists() for file in ("config.json", "tokenizer.json", "tokenizer_config.json")):
        return False
    if not ((folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()):
        return False
    ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    return isinstance(ids, dict) and all(ids.get(token) == n for n, token in enumerate(("<s>", "<pad>", "</s>")))
