"""Whether the fast path supports a model, and whether the model has changed since it was inspected.

A decoder reads a model once, and every call has to check that it is still the same. On a small model this takes as long
as several decode steps. So a call compares lists of all modules at once, and inspects each module only where these
differ.
"""

import sys
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import is_, itemgetter, methodcaller
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from skipdecode.families import FAMILIES, BlockParts, text_config
from skipdecode.internals import (
    HOOKS_OF_MODULES,
    PARTS_OF_MODULES,
    REPLACEMENTS_IN_MODULES,
    STEP_METHODS,
    all_modules,
    all_parameters,
    attention_name,
    has_global_hooks,
    hooks_of,
    versions_of,
)

# How many values of each parameter are compared to detect changes.
SAMPLED = 32
# Attributes of modules that a decoder reads once.
_READ_ONCE = ("scaling", "eps", "variance_epsilon", "layer_idx", "use_parallel_residual", "do_layer_norm_before")
_READ_ONCE_OF_CONFIG = ("num_attention_heads", "num_key_value_heads", "sliding_window", "layer_types")
# All of them compute softmax(q k / scale) v, so that it doesn't matter which one the model uses.
_KNOWN_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Inspection:
    """The state of a model when it was inspected: its modules, their settings and the addresses of its weights.

    It doesn't hold the model itself. `reason` says why the fast path doesn't support the modules; None where it does.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        first, *self.modules = all_modules(model)
        self.parameters = list(all_parameters([first, *self.modules]))
        self._read_once = [
            (module.__dict__, name) for module in self.modules for name in _READ_ONCE if name in module.__dict__
        ]
        self._kinds: list[Any] = list(dict.fromkeys(map(type, [first, *self.modules])))
        self._plain = all(type(p) is nn.Parameter for p in self.parameters)
        self.settings = self._settings(model)
        self.addresses = self._addresses()
        self.reason = _changed_modules(model, [first, *self.modules]) or _unusual_weights(self.parameters)
        # Unsupported modules may lack these attributes, and hooks that do more than watch may hold the model.
        self._held, self._facts = self._state(model) if self.reason is None else ([], [])

    def still_holds(self, model: PreTrainedModel) -> bool:
        """Whether an inspection of the model would find the same; always False where the fast path isn't supported."""
        if self.reason is not None or hooks_of(model):  # hooks of the model itself aren't part of the state
            return False
        held, facts = self._state(model)
        same = facts == self._facts and len(held) == len(self._held) and all(map(is_, held, self._held))
        return same and self._addresses() == self.addresses and self._settings(model) == self.settings

    def same_weights_as(self, other: "Inspection") -> bool:
        """Whether another inspection of the model found the same modules, settings and weights."""
        ours, theirs = ((each.modules, each.settings, each.addresses) for each in (self, other))
        # Another parameter with the same memory has a version counter of its own.
        return self is other or (ours == theirs and all(map(is_, self.parameters, other.parameters)))

    def _state(self, model: PreTrainedModel) -> tuple[list[Any], list[Any]]:
        """What must stay the same objects (parameters, children and hooks of modules), and what must stay equal."""
        modules = [model, *self.modules]
        attributes: list[dict[str, Any]] = list(map(vars, modules))
        tables: list[dict[str, Any]] = list(itemgetter(*PARTS_OF_MODULES)(attributes[0]))
        tables += chain.from_iterable(map(itemgetter(*PARTS_OF_MODULES, *HOOKS_OF_MODULES), attributes[1:]))
        facts = [list(map(type, modules)), list(map(len, attributes)), list(map(len, tables))]
        facts += [list(map(itemgetter("training"), attributes)), [kind.forward for kind in self._kinds]]
        facts += [list(map(dict.__contains__, attributes, repeat(name))) for name in REPLACEMENTS_IN_MODULES]
        return list(chain.from_iterable(map(dict.values, tables))), facts

    def _addresses(self) -> list[int]:  # other libraries' parameters may have none
        return list(map(torch.Tensor.data_ptr, self.parameters)) if self._plain else []

    def _settings(self, model: PreTrainedModel) -> list[Any]:
        config = text_config(model.config)
        of_config = [getattr(config, name, None) for name in _READ_ONCE_OF_CONFIG]
        of_config = [
            list(value) if isinstance(value, list) else value for value in of_config
        ]  # a copy, as the config may change
        return [*of_config, *[attributes.get(name) for attributes, name in self._read_once]]


class Fingerprint:
    """What tells whether the weights that a decoder was made from have changed.

    Version counters and addresses alone can't tell: fused optimisers, `parameter.data` and parameters made in inference
    mode change values without changing `_version`, as do adapters that are merged into the model. So `SAMPLED` values
    of each parameter, evenly spread, are compared too. A change that leaves both the counters and these values as they
    were isn't detected, such as a single row of an embedding that is written through `.data`.
    """

    def __init__(self, inspection: Inspection) -> None:
        self._inspection = inspection
        self._counted = [p for p in self._inspection.parameters if not p.is_inference()]
        self._versions = versions_of(self._counted)
        self._views = [_spread_values(p) for p in self._inspection.parameters]
        on_cpu = all(view.device.type == "cpu" for view in self._views)
        self._arrays = [view.view(_INTEGERS[view.element_size()]).numpy() for view in self._views] if on_cpu else None
        self._values = self._sample()

    def still_holds(self, inspection: Inspection) -> bool:
        """Whether the weights are the same, given the latest inspection of the model."""
        same = inspection.same_weights_as(self._inspection) and versions_of(self._counted) == self._versions
        return same and self._sample() == self._values

    def _sample(self) -> bytes:  # bytes are compared, as NaN is not equal to itself
        if self._arrays is not None:  # much faster than torch.cat for many small views
            return b"".join(map(methodcaller("tobytes"), self._arrays))
        sample: bytes = torch.cat(self._views).view(torch.uint8).cpu().numpy().tobytes()
        return sample


def _spread_values(parameter: torch.Tensor) -> torch.Tensor:
    """A view of up to `SAMPLED` evenly spread values of a parameter."""
    values = parameter.detach()
    span = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    step = max(1, span // SAMPLED)
    return values.as_strided((min(span, SAMPLED),), (step,), values.storage_offset() + (step - 1) // 2)


def why_unsupported(model: PreTrainedModel) -> str | None:
    """Why the fast path doesn't support a model's settings or functions; None where it does."""
    parts = parts_of(model)
    if parts is None:
        return f"the parts of model_type {model.config.model_type!r} are not known"
    if model.training:
        return "the model is in training mode"
    config = text_config(model.config)
    for name, value in parts.plain.items():
        if getattr(config, name, value) != value:
            return f"its config has {name}={getattr(config, name)!r}"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        return f"its rotary embedding is of type {rope['rope_type']!r}, which depends on the length"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on"
    quantisation = getattr(model.config, "quantization_config", None)
    if quantisation is not None:
        values = quantisation if isinstance(quantisation, dict) else vars(quantisation)
        method = values.get("quant_method")
        return f"its weights are quantised ({getattr(method, 'value', method)})"
    return _changed_functions(model, config)


def _changed_functions(model: PreTrainedModel, config: Any) -> str | None:
    """Which function beside the modules isn't torch's or transformers' own, if any."""
    if has_global_hooks():
        return "global hooks are registered"
    for name in STEP_METHODS:
        if getattr(getattr(model, name), "__func__", None) is not getattr(type(model), name):
            return f"its {name} is replaced"
    attention = attention_name(config)
    if attention not in _KNOWN_ATTENTION:
        return f"its attention is {attention!r}"
    functions = [ALL_ATTENTION_FUNCTIONS.get(attention), ALL_MASK_ATTENTION_FUNCTIONS.get(attention)]
    modeling = sys.modules.get(type(model).__module__)
    functions += [value for value in vars(modeling).values() if isinstance(value, FunctionType)]
    for function in functions:
        if function is not None and not _is_libraries(function):
            return f"{getattr(function, '__name__', function)!r} of its attention or its module is replaced"
    return None


def _changed_modules(model: PreTrainedModel, modules: Iterable[nn.Module]) -> str | None:
    """Which module doesn't compute what torch's or transformers' class does; None where all do."""
    kinds = set()
    for module in modules:
        found = module.__dict__
        if not all(map(_only_watches, hooks_of(module))):
            return f"{_name_of(module, model)} has hooks"
        if "forward" in found or "__call__" in found:
            return f"the forward of {_name_of(module, model)} is replaced"
        if found["training"]:
            return f"{_name_of(module, model)} is in training mode"
        kind = type(module)
        if kind in kinds:
            continue
        kinds.add(kind)
        home = kind.__module__
        # transformers.integrations has the projections of models that other libraries quantised.
        known = home.startswith(("torch.nn.modules.", "transformers.")) and ".integrations." not in home
        if not known:
            return f"{_name_of(module, model)} is a {kind.__name__}"
        if not _is_libraries(kind.forward):
            return f"the forward of {kind.__name__} is replaced"
    return None


def _unusual_weights(parameters: Sequence[nn.Parameter]) -> str | None:
    if len({(p.device, p.dtype) for p in parameters}) > 1:
        return "its weights are on several devices or of several types"
    if any(hasattr(p, "ds_id") for p in parameters):
        return "its weights are sharded"
    if any(type(p) is not nn.Parameter for p in parameters):
        return "its weights are tensors of another kind"
    if not parameters[0].is_floating_point():
        return "its weights are quantised"
    return None


def _is_libraries(function: Any) -> bool:
    """Whether a function, with what it wraps, comes from torch, transformers, Python or the Hub's kernels."""
    while function is not None:
        home = getattr(function, "__globals__", {}).get("__name__", "").split(".")[0]
        if home not in ("torch", "transformers", "kernels") and home not in sys.stdlib_module_names:
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _only_watches(hook: Any) -> bool:
    """Whether a hook leaves values as they are: it collects hidden states, or makes inputs require gradients."""
    name, home = getattr(hook, "__name__", ""), getattr(hook, "__module__", None) or ""
    asks_for_gradients = name.startswith("make_inputs_require_grad") and home.split(".")[0] in ("transformers", "peft")
    return home == "transformers.utils.output_capturing" or asks_for_gradients


def _name_of(module: nn.Module, model: PreTrainedModel) -> str:
    return next(name for name, other in model.named_modules() if other is module) or "the model"


def parts_of(model: PreTrainedModel) -> BlockParts | None:
    """The names of the parts of its layers; None for a family that the fast path doesn't know."""
    family = FAMILIES.get(model.config.model_type)
    return family.parts if family is not None else None
