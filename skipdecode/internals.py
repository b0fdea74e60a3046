"""All that the library uses of transformers and torch and that they don't promise to keep.

Each function says what its name stands for, and why no public one serves. All were looked up, and are tested, in
transformers 5.17 to 5.23 and torch 2.13; torch 2.11 and 2.12 have the same names with the same signatures. What
`pyproject.toml` allows ends there: before it is widened, look here, and run `make test` and `make test-oldest`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import GenerationMixin
from transformers.utils.hub import cached_file
from transformers.utils.output_capturing import _active_collector

Decoding = TypeVar("Decoding", bound=Callable[..., Any])

# ---- transformers: generate


def is_callers_cache(cache: Any) -> bool:
    """True where a cache came from the caller of `generate`, who will look at it, and not from `generate`.

    Both reach a `custom_generate` under the same name, alike but for this mark.
    """
    return getattr(cache, "_is_user_defined", False)


def padding_token(generation_config: Any) -> torch.Tensor:
    """The padding token on the model's device, which `generate` has chosen where the caller named none.

    `pad_token_id` stays None then.
    """
    token: torch.Tensor = generation_config._pad_token_tensor
    return token


def prefix_allowed_tokens(processor: Any) -> Callable[[int, torch.Tensor], Any]:
    """The `prefix_allowed_tokens_fn` of a `PrefixConstrainedLogitsProcessor`, of a row's number and its text."""
    found: Callable[[int, torch.Tensor], Any] = processor._prefix_allowed_tokens_fn
    return found


def has_unfinished_sequences(model: Any, finished: bool, synced_gpus: bool, device: torch.device) -> bool:
    """True while this process, or under `synced_gpus` any of those that share the model, has a row to finish.

    The public decoding loops of transformers call it too; the collective operation must be theirs.
    """
    return bool(model._has_unfinished_sequences(finished, synced_gpus, device=device))


def arguments_of_next_step(model: Any, outputs: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the public `prepare_inputs_for_generation` after a forward pass gave `outputs`."""
    following: dict[str, Any] = model._update_model_kwargs_for_generation(outputs, arguments, is_encoder_decoder=False)
    return following


STEP_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")  # a model may replace them


def argument_of_generate(name: str) -> Any:
    """An argument that `generate` was called with, by its name: `streamer` or `assistant_model`.

    `generate` hands them to its own decoding loops but drops them on the way to a callable, a streamer after having
    put the prompt into it: a reader would wait for ever. They are read from the frame of the call.
    """
    generate = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not generate:
        frame = frame.f_back
    return frame.f_locals.get(name) if frame is not None else None


# Of a generation_config.json that was made from a model's config: with it, transformers passes over every entry that it
# doesn't know. It writes the key itself and reads it again; nothing else takes it out of the file.
FROM_MODEL_CONFIG = "_from_model_config"


class _SignatureWithTokenizer(inspect.Signature):
    """The signature of a function that gets `generate` to use the tokenizer that it was called with.

    `generate` reads `stop_strings` with the tokenizer that it will hand to the decoding loop. A callable is handed what
    its signature names, but for the tokenizer, which has been taken out before generate looks, in
    `_extract_generation_mode_kwargs`. This puts it back when generate looks.
    """

    @property
    def parameters(self) -> Any:
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        if caller is not None and caller.f_code is GenerationMixin._extract_generation_mode_kwargs.__code__:
            found = caller.f_locals
            if "tokenizer" in found.get("generation_mode_kwargs", ()):
                found["kwargs"].setdefault("tokenizer", found["generation_mode_kwargs"]["tokenizer"])
        return super().parameters


def receives_tokenizer(function: Decoding) -> Decoding:
    """A `custom_generate` that names `tokenizer` in its signature, and is given it."""
    signature = _SignatureWithTokenizer(list(inspect.signature(function).parameters.values()))
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


# ---- transformers: models


def attention_name(config: Any) -> str:
    """The attention that a model computes; the public `attn_implementation` says what was asked for at loading."""
    return config._attn_implementation or "eager"


def is_cached(name: str, file: str, **where: Any) -> bool:
    """True where the cache holds a file of a repository. Without the private argument a missing one is an exception."""
    quietly: dict[str, Any] = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    return cached_file(name, file, **quietly, **where) is not None


def drop_gguf_title(config: Any) -> None:
    """Take out of a config the title that a GGUF file has.

    transformers keeps it under a name that says it is a path, and would save it.
    """
    vars(config).pop("_model_name_or_path", None)


def captured_outputs() -> set[str]:
    """The names of what layers are asked to hand out beside their result: "hidden_states", "attentions" and so on.

    transformers collects these by hooks in a context, and no argument of a layer says so.
    """
    return set(_active_collector.get() or ())


# ---- torch: modules


def all_modules(model: nn.Module) -> Iterator[nn.Module]:
    """As `model.modules()`, in a fraction of its time; what stands in two places comes twice."""
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None:
            yield module
            waiting.extend(module._modules.values())


def all_parameters(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """As `parameters()` of each module alone, in a fraction of its time."""
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter


# Tables among a module's attributes.
PARTS_OF_MODULES = ("_parameters", "_modules")
HOOKS_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks")
# What replaces a module's computation, where it stands among them.
REPLACEMENTS_IN_MODULES = ("forward", "__call__", "_hf_hook")


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Autograd's counts of the times that tensors were written in place. Those of inference mode have none."""
    return list(map(attrgetter("_version"), tensors))


def has_global_hooks() -> bool:
    """True where hooks are registered for every module there is. torch has a way to add them, and none to ask."""
    return bool(_global_forward_hooks or _global_forward_pre_hooks)


def hooks_of(module: nn.Module) -> list[Any]:
    """A module's hooks around its forward pass, and accelerate's, which replaces it. No public name lists them."""
    found = module.__dict__
    hooks = [*found["_forward_hooks"].values(), *found["_forward_pre_hooks"].values()]
    return [*hooks, found["_hf_hook"]] if "_hf_hook" in found else hooks


def is_replica(module: nn.Module) -> bool:
    """True for the copies of modules that `torch.nn.DataParallel` makes for a single pass."""
    return getattr(module, "_is_replica", False)


# ---- torch: oneDNN's operators on CPU, which torch.compile and torch's quantised export end in. No public name runs a
# linear layer on packed weights, or one in 8 bits that takes plain tensors (docs/decisions/0006).


def has_bfloat16_on_cpu() -> bool:
    """True where oneDNN computes in bfloat16 on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """`weight` [out, in] in the blocked layout that suits inputs of so many rows."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def packed_linear_operator() -> Any:
    """The operator (inputs, packed weight, bias, "none", [], "") -> outputs."""
    return torch.ops.mkldnn._linear_pointwise


def pack_int8(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [out, in] of int8 in the layout that `int8_linear_operator` reads."""
    packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(weight, [1, weight.shape[1]])
    return packed


def int8_linear_operator() -> Any:
    """The operator on inputs of uint8 and weights of int8, with the scale and zero point of each."""
    return torch.ops.onednn.qlinear_pointwise
