"""All private interfaces of transformers and torch that the library uses.

Each function says what it gives and why no public interface serves. All were verified and are tested in transformers
5.17 to 5.23 and torch 2.13; torch 2.11 and 2.12 have the same names with the same signatures. `pyproject.toml` allows
no other versions: before allowing more, check the names here, and run `make test` and `make test-oldest`.
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
    """Whether a cache was given by the caller of `generate`, who may read it later, and not created by `generate`.

    `custom_generate` receives both under the same name; only this private mark distinguishes them.
    """
    return getattr(cache, "_is_user_defined", False)


def padding_token(generation_config: Any) -> torch.Tensor:
    """The padding token on the model's device, as `generate` chose it if the caller gave none.

    The public `pad_token_id` stays None in that case.
    """
    token: torch.Tensor = generation_config._pad_token_tensor
    return token


def prefix_allowed_tokens(processor: Any) -> Callable[[int, torch.Tensor], Any]:
    """A `PrefixConstrainedLogitsProcessor`'s `prefix_allowed_tokens_fn`: (row, its token ids) -> allowed tokens."""
    found: Callable[[int, torch.Tensor], Any] = processor._prefix_allowed_tokens_fn
    return found


def has_unfinished_sequences(model: Any, finished: bool, synced_gpus: bool, device: torch.device) -> bool:
    """Whether this process, or with `synced_gpus` any process that shares the model, has an unfinished sequence.

    transformers' own decoding loops in the other processes call this method, and the collective operation must match.
    """
    return bool(model._has_unfinished_sequences(finished, synced_gpus, device=device))


def arguments_of_next_step(model: Any, outputs: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the public `prepare_inputs_for_generation` for the step after the one that gave `outputs`."""
    following: dict[str, Any] = model._update_model_kwargs_for_generation(outputs, arguments, is_encoder_decoder=False)
    return following


STEP_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")  # a model may override them


def argument_of_generate(name: str) -> Any:
    """An argument of the call of `generate`: `streamer` or `assistant_model`. It is read from the call's frame.

    `generate` doesn't pass these to a callable `custom_generate`, although it has already put the prompt into the
    streamer, whose reader would wait for ever.
    """
    generate = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not generate:
        frame = frame.f_back
    return frame.f_locals.get(name) if frame is not None else None


# A key that transformers writes into a generation_config.json that it derives from a model's config. With it,
# transformers ignores every entry that it doesn't know; it has no function that removes the key.
FROM_MODEL_CONFIG = "_from_model_config"


class _SignatureWithTokenizer(inspect.Signature):
    """The signature of a `custom_generate` function that receives the tokenizer of the call of `generate`.

    `generate` passes the arguments that the signature names, but `_extract_generation_mode_kwargs` removes the
    tokenizer before it inspects the signature. Without it `generate` can't read `stop_strings` either. Reading
    `parameters` puts the tokenizer back.
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
    """Decorate a `custom_generate` function that has a parameter `tokenizer`, so that it receives it."""
    signature = _SignatureWithTokenizer(list(inspect.signature(function).parameters.values()))
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


# ---- transformers: Trainer, and accelerate, which it needs


def prepared_inputs(trainer: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """A batch on the trainer's device, as the Trainer prepares it before a forward pass. No public method does."""
    found: dict[str, Any] = trainer._prepare_inputs(inputs)
    return found


def set_sync_gradients(gradient_state: Any, synchronise: bool) -> None:
    """Set whether the next backward pass ends a step; accelerate's public `no_sync` doesn't tell its optimizer.

    The Trainer sets it before each accumulated batch; a step with several passes a batch sets it for each of them.
    """
    gradient_state._set_sync_gradients(synchronise)


# ---- transformers: models


def attention_name(config: Any) -> str:
    """The attention implementation in use; the public `attn_implementation` is the one requested at loading."""
    return config._attn_implementation or "eager"


def is_cached(name: str, file: str, **where: Any) -> bool:
    """Whether the cache contains a file of a repository. Without the private argument, a missing file is an error."""
    options: dict[str, Any] = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    return cached_file(name, file, **options, **where) is not None


def drop_gguf_title(config: Any) -> None:
    """Remove the title of a GGUF file from a config, where transformers stores it as if it were a path, to be saved."""
    vars(config).pop("_model_name_or_path", None)


def captured_outputs() -> set[str]:
    """The names of the outputs that transformers collects from layers: "hidden_states", "attentions" and so on.

    It collects them with hooks, so no argument of a layer reveals the request.
    """
    return set(_active_collector.get() or ())


# ---- torch: modules


def all_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Like `model.modules()`, but several times faster; a module that occurs twice is yielded twice."""
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None:
            yield module
            waiting.extend(module._modules.values())


def all_parameters(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """Like `parameters(recurse=False)` of each module, but several times faster."""
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter


# Attributes of modules: tables of their parts and hooks, and names that, set on an instance, replace its computation.
PARTS_OF_MODULES = ("_parameters", "_modules")
HOOKS_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks")
REPLACEMENTS_IN_MODULES = ("forward", "__call__", "_hf_hook")


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each tensor has been written in place, as counted by autograd; inference tensors have no count."""
    return list(map(attrgetter("_version"), tensors))


def has_global_hooks() -> bool:
    """Whether forward hooks are registered for all modules. torch has functions to add such hooks, but none to list."""
    return bool(_global_forward_hooks or _global_forward_pre_hooks)


def hooks_of(module: nn.Module) -> list[Any]:
    """A module's forward hooks and accelerate's hook, which wraps its forward pass. No public function lists them."""
    found = module.__dict__
    hooks = [*found["_forward_hooks"].values(), *found["_forward_pre_hooks"].values()]
    return [*hooks, found["_hf_hook"]] if "_hf_hook" in found else hooks


def is_replica(module: nn.Module) -> bool:
    """Whether a module is a copy that `torch.nn.DataParallel` made for a single forward pass."""
    return getattr(module, "_is_replica", False)


# ---- torch: oneDNN's operators on CPU, which torch.compile and quantised export use. No public function runs a linear
# layer on packed weights, or an 8-bit one on plain tensors (docs/decisions/0006).


def has_bfloat16_on_cpu() -> bool:
    """Whether oneDNN computes in bfloat16 on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """`weight` [out, in] in the blocked layout for inputs of `rows` rows."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def packed_linear_operator() -> Any:
    """The operator (inputs, packed weight, bias, "none", [], "") -> outputs."""
    return torch.ops.mkldnn._linear_pointwise


def pack_int8(weight: torch.Tensor) -> torch.Tensor:
    """The int8 `weight` [out, in] in the layout that `int8_linear_operator` reads."""
    packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(weight, [1, weight.shape[1]])
    return packed


def int8_linear_operator() -> Any:
    """The operator on uint8 inputs and int8 weights, with a scale and zero point for each."""
    return torch.ops.onednn.qlinear_pointwise
