"""Load a checkpoint's model and tokenizer from a folder or the Hugging Face Hub, and check its files and weights."""

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

from skipdecode.checkpoint.checksums import CHECKSUMS_FILE, verify_checksums
from skipdecode.checkpoint.four_bit import keep_exact, nf4, stored_values
from skipdecode.checkpoint.from_gguf import find_gguf, gguf_files, read_model, read_tokenizer
from skipdecode.checkpoint.offline import looks_local, without_network
from skipdecode.checkpoint.skip_config import ADAPTERS_FILE, CONFIG_KEY, SkipConfig
from skipdecode.errors import ConfigError, first_line
from skipdecode.families import text_config

_ADAPTERS_CONFIG = "adapter_config.json"
_HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only")  # of from_pretrained, for model and tokenizer

# The differences of OPT's tokenizer from GPT-2's; </s> both starts and ends a sequence.
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
    """Load a checkpoint for decoding.

    `model.generate(**tokenizer(prompts, return_tensors="pt", padding=True), custom_generate=skip_generate, speedup=3)`
    then decodes with it.

    Args:
        name: a local folder or a repository of the Hub.
        dtype: data type of the weights; default: as they are stored, and float32 for GGUF.
        gguf_file: a GGUF file in that folder or repository, from which model and tokenizer are read instead of from the
            other files (needs `pip install 'skipdecode[gguf]'`). Its weights are dequantised.
        trust_remote_code: whether Python code in the checkpoint may run; if not, a checkpoint that needs it is refused.
        kwargs: arguments of `AutoModelForCausalLM.from_pretrained`, such as `device_map` or `revision`.

    Returns:
        The model, in evaluation mode, and a tokenizer that pads on the left.

    Raises:
        ConfigError: where there is no such checkpoint, or it can't be loaded or is damaged, see `load_model`.
    """
    options: dict[str, Any] = {"gguf_file": gguf_file, "trust_remote_code": trust_remote_code}
    model = load_model(name, dtype, **options, **kwargs).eval()
    model.config.return_dict = text_config(model.config).return_dict = True  # callers read `.logits` of the outputs
    return model, load_tokenizer(name, **options, **hub_arguments(kwargs))


def load_model(
    name: str,
    dtype: torch.dtype | None = None,
    *,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a causal language model, for a folder of adapters with its base model; arguments as in `load`.

    Adapters that were trained on a base in 4 bits (`model.quantize` of a recipe) get it again, which needs the extra
    `qlora`; with `quantization_config=None` they get it as it is stored.

    The files are compared with the folder's checksum file, where it has one (`skipdecode.checkpoint.checksums`). The
    weights must be safetensors, complete, with the config's names and shapes, and finite; this last check takes about
    as long as a decode step at full depth.

    Raises:
        ConfigError: where there is no such checkpoint, a check fails, or it contains code that isn't trusted.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"the checkpoint's name is {name!r}: give a folder, or a repository of the Hub")
    if gguf_file is not None:
        return _load_gguf(name, gguf_file, dtype, kwargs)
    path, local = Path(name), looks_local(name)
    if local and not any((path / file).is_file() for file in ("config.json", _ADAPTERS_CONFIG)):
        raise _no_checkpoint(name, path)
    if local:
        _check_files(path)
    else:
        kwargs |= without_network(name, **hub_arguments(kwargs))
    adapters = _adapters_config(name, path if local else None, kwargs)
    if adapters is not None and adapters.base_weights is not None and "quantization_config" not in kwargs:
        dtype = dtype or getattr(torch, adapters.base_weights["dtype"])
        kwargs["quantization_config"] = nf4(dtype)
    options = {"dtype": dtype or "auto", "trust_remote_code": trust_remote_code, "use_safetensors": True, **kwargs}
    options["ignore_mismatched_sizes"] = True  # so that they are listed; _check_weights refuses them
    if kwargs.get("local_files_only"):
        options["adapter_kwargs"] = {"local_files_only": True, **kwargs.get("adapter_kwargs", {})}
    adapted = adapted_checkpoint(path) if local else None
    if adapted is not None:
        model = load_model(adapted, dtype, trust_remote_code=trust_remote_code, **kwargs)
        info = _call_loader(name, lambda: model.load_adapter(str(path), use_safetensors=True).to_dict())
    else:
        with _NoRandomWeights():
            model, info = _call_loader(
                name, lambda: AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **options)
            )
    if not local:
        _verify_download(name, kwargs)
    _check_weights(name, model, info, adapted)
    keep_exact(model)
    # With trust_remote_code, transformers replaces `generate` by the checkpoint's custom_generate, which skip_generate
    # must not call.
    model.__dict__.pop("generate", None)
    if adapters is not None and hasattr(model, "peft_config"):  # it replaces the base model's schedules
        setattr(model.config, CONFIG_KEY, adapters.to_dict())
    return model


def _adapters_config(name: str, folder: Path | None, kwargs: Mapping[str, Any]) -> SkipConfig | None:
    """The schedules of adapters, which also say how their base is loaded; None where there are none.

    Args:
        name: the checkpoint's name.
        folder: its folder; None for a repository of the Hub.
        kwargs: the arguments of `load_model`.
    """
    file = downloaded(name, ADAPTERS_FILE, kwargs) if folder is None else folder / ADAPTERS_FILE
    if file is None or not file.is_file():
        return None
    if folder is None:
        _verify_download(name, kwargs)
    return SkipConfig.load(file.parent)


def hub_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `from_pretrained` that determine from where, and which version of, a repository is read."""
    return {key: arguments[key] for key in _HUB_ARGUMENTS if key in arguments}


def _no_checkpoint(name: str, path: Path) -> ConfigError:
    found = gguf_files(path if path.is_dir() else path.parent)
    option = "--gguf-file (in a recipe model.gguf_file, in Python gguf_file)"
    if path.is_file() and path.name in found:
        return ConfigError(f"{name!r} is a GGUF file, not a checkpoint: give its folder, and the file with {option}")
    if path.is_dir() and found:
        return ConfigError(
            f"{name!r} isn't a checkpoint: it has no config.json; read its GGUF file {found[0]} with {option}"
        )
    what = "has no config.json" if path.is_dir() else "is not a folder"
    return ConfigError(f"{name!r} isn't a checkpoint: it {what}; give the output folder of a finished run")


def _load_gguf(name: str, gguf_file: str, dtype: torch.dtype | None, kwargs: Mapping[str, Any]) -> PreTrainedModel:
    path = find_gguf(name, gguf_file, hub_arguments(kwargs))
    options = {key: value for key, value in kwargs.items() if key not in _HUB_ARGUMENTS}
    model: PreTrainedModel
    with _NoRandomWeights():
        model, info = _call_loader(str(path), lambda: read_model(path, dtype, ignore_mismatched_sizes=True, **options))
    _check_weights(str(path), model, info, None)
    model.name_or_path = model.config.name_or_path = name
    return model


def _call_loader(name: str, load: Callable[[], Any]) -> Any:
    """Call `load` without transformers' warnings. Raises ConfigError where it fails."""
    try:
        with warnings_off():
            return load()
    except ConfigError:
        raise
    except Exception as error:  # damaged weights raise safetensors' own errors, which have no common base class
        check_trust(name, error)
        if "use_safetensors" in str(error):  # a repository of the Hub that has no safetensors
            raise _pickled(name) from error
        raise ConfigError(f"{name!r} can't be loaded as a causal language model: {first_line(error)}") from error


class _NoRandomWeights(TorchFunctionMode):
    """Skip the random initialisation of modules, since all weights are loaded afterwards.

    transformers creates modules on the meta device, where torch's initialisation functions are slow.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def warnings_off() -> Iterator[None]:
    """Silence transformers' warnings, which would precede the one-line error message."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _pickled(name: str) -> ConfigError:
    return ConfigError(
        f"{name!r} stores its weights as pickles (.bin), which can run code when they are read: if you trust them, "
        "convert them with transformers' AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(FOLDER), and save "
        "the tokenizer likewise"
    )


def check_trust(name: str, error: BaseException) -> None:
    """Raise ConfigError where transformers' error means that the checkpoint's own code would have to run."""
    if "trust_remote_code" in str(error):
        raise ConfigError(
            f"{name!r} contains Python code that must run to load it: read that code first, and then pass "
            "--trust-remote-code (in a recipe model.trust_remote_code=true, in Python trust_remote_code=True)"
        ) from error


def _check_files(folder: Path) -> None:
    """Check a folder's files before its weights are read."""
    verify_checksums(folder)
    for index in folder.glob("*.safetensors.index.json"):
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            outside = [shard for shard in shards if Path(shard).name != shard]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is damaged ({type(error).__name__}: {error})") from error
        if outside:
            raise ConfigError(f"{index} names {outside[0]!r}: weights must be in the folder itself")
    pickled = sorted(file.name for file in folder.glob("*.bin") if file.name.startswith(("pytorch_", "adapter_")))
    if pickled and not any(folder.glob("*.safetensors")):
        raise _pickled(str(folder))


def adapted_checkpoint(folder: Path) -> str | None:
    """The base model of a folder of adapters; None for any other folder. Raises ConfigError where it isn't named."""
    file = folder / _ADAPTERS_CONFIG
    if (folder / "config.json").is_file() or not file.is_file():
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is damaged ({type(error).__name__}: {error})") from error
    if not base:
        raise ConfigError(
            f"{file} doesn't name the base model of its adapters (base_model_name_or_path): it had random weights, or "
            "was changed for the training (model.layers, model.config); load the finished run with merged adapters"
        )
    if not isinstance(base, str) or (Path(base) / _ADAPTERS_CONFIG).is_file():
        raise ConfigError(f"{file}: base_model_name_or_path is {base!r}: expected the folder or Hub name of a model")
    return base


def downloaded(name: str, file: str, arguments: Mapping[str, Any]) -> Path | None:
    """The local path of a file of a Hub repository; None where it doesn't exist or can't be downloaded."""
    try:
        return Path(str(cached_file(name, file, **hub_arguments(arguments))))
    except OSError:
        return None


def _verify_download(name: str, arguments: Mapping[str, Any]) -> None:
    """Verify those files of a Hub repository that have been downloaded."""
    checksums = downloaded(name, CHECKSUMS_FILE, arguments)
    if checksums is not None:
        verify_checksums(checksums.parent, allow_missing=True)


def _check_weights(name: str, model: PreTrainedModel, info: Mapping[str, Any], adapted: str | None) -> None:
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    names = model.state_dict().keys()
    extra_layers = [key for key in unexpected if re.sub(r"\.\d+\.", ".0.", key, count=1) in names]
    if missing:
        instead = f", and contains {unexpected[0]} instead" if unexpected else ""
        raise ConfigError(
            f"{name!r} lacks {len(missing)} of its weights, such as {missing[0]}{instead}: "
            + (
                "use an intact copy"
                if adapted is None
                else f"its adapters aren't for {adapted}, but perhaps for some of its layers (model.layers), or damaged"
            )
        )
    if info["mismatched_keys"]:
        key, found, expected = min(info["mismatched_keys"])
        raise ConfigError(
            f"{name!r} contains {key} of shape {tuple(found)}, but its config.json implies {tuple(expected)}: use an "
            "intact copy"
        )
    if extra_layers:
        raise ConfigError(
            f"{name!r} contains layers beyond those of its config.json, such as {extra_layers[0]}: use an intact copy"
        )
    for parameter, tensor in model.named_parameters():
        values = stored_values(getattr(tensor, "ds_tensor", tensor)).detach()  # with ZeRO-3, this process's shard
        if values.numel() == 0 or values.is_meta or not values.is_floating_point():
            continue
        bounds = torch.aminmax(values.float() if values.dtype.itemsize == 1 else values)
        if not all(map(torch.isfinite, bounds)):
            raise ConfigError(
                f"{name!r} has values in {parameter} that aren't finite ({values.dtype}): use an intact copy"
            )


def load_tokenizer(
    name: str, *, gguf_file: str | None = None, trust_remote_code: bool = False, **kwargs: Any
) -> PreTrainedTokenizerBase:
    """Load a tokenizer that pads on the left, as decoding in batches needs; arguments as in `load`.

    A folder with only OPT's `vocab.json` and `merges.txt`, which don't name their tokenizer, is read as OPT's.

    Raises:
        ConfigError: where there is no tokenizer, or it is damaged or contains code that isn't trusted.
    """
    path = None if gguf_file is None else find_gguf(name, gguf_file, kwargs)
    what = name if path is None else str(path)
    if path is None and Path(name).is_dir():
        verify_checksums(Path(name))
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
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged file
        check_trust(what, error)
        raise ConfigError(f"{what!r} has no tokenizer that can be loaded: {first_line(error)}") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes one up where there are no files
        raise ConfigError(f"{what!r} has no tokenizer that can be loaded: there is no vocabulary file")
    if path is None and not Path(name).is_dir():
        _verify_download(name, kwargs)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {what!r} has no end-of-text token, so generation could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _is_bare_opt(folder: Path) -> bool:
    """Whether a folder's only tokenizer files are merges and a vocabulary that starts like OPT's."""
    if any((folder / file).exists() for file in ("config.json", "tokenizer.json", "tokenizer_config.json")):
        return False
    if not ((folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()):
        return False
    ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    return isinstance(ids, dict) and all(ids.get(token) == n for n, token in enumerate(("<s>", "<pad>", "</s>")))
