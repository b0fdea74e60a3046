"""Whether a model is made of plain parts, and still of those that it was made of when somebody looked.

Decoders read a model once, and every call asks again, which on a small model takes as long as several steps. So a call
compares lists of all modules at once, and looks at each module only where something differs.
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
    hooks_of,
    hooks_on_all,
    versions_of,
)

# Values of each parameter that are looked at for changes.
SAMPLED = 32
# Attributes of modules that a decoder reads once.
_READ_ONCE = ("scaling", "eps", "variance_epsilon", "layer_idx", "use_parallel_residual", "do_layer_norm_before")
_READ_ONCE_OF_CONFIG = ("num_attention_heads", "num_key_value_heads", "sliding_window", "layer_types")
# All of them compute softmax(q k / scale) v, and a lean step need not say which.
_KNOWN_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Look:
    """What was seen of a model: its modules, how they compute, and where its weights lie. The model itself isn't held.

    Attributes:
        modules: that the model consists of.
        parameters: the modules' and the model's own.
        settings: what decoders read once.
        addresses: of the parameters.
        reason: why these parts can't be computed without the model's forward pass; None where they can.
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
        # Modules that aren't plain needn't have what is told, and hooks that do more than watch may hold the model.
        self._held, self._facts = self._told(model) if self.reason is None else ([], [])

    def still_holds(self, model: PreTrainedModel) -> bool:
        """Whether a look at the model would see the same; False where it may, as with parts that aren't plain."""
        if self.reason is not None or hooks_of(model):  # the model's own aren't told
            return False
        held, facts = self._told(model)
        same = facts == self._facts and len(held) == len(self._held) and all(map(is_, held, self._held))
        return same and self._addresses() == self.addresses and self._settings(model) == self.settings

    def same_weights_as(self, other: "Look") -> bool:
        """Whether another look at the model saw the same parts, with the same settings and weights."""
        ours, theirs = ((each.modules, each.settings, each.addresses) for each in (self, other))
        # Another parameter of the same memory counts its changes apart from the one before.
        return self is other or (ours == theirs and all(map(is_, self.parameters, other.parameters)))

    def _told(self, model: PreTrainedModel) -> tuple[list[Any], list[Any]]:
        """The modules' parameters, children and hooks, which must be the same objects; and what must be equal."""
        modules = [model, *self.modules]
        attributes: list[dict[str, Any]] = list(map(vars, modules))
        tables: list[dict[str, Any]] = list(itemgetter(*PARTS_OF_MODULES)(attributes[0]))
        tables += chain.from_iterable(map(itemgetter(*PARTS_OF_MODULES, *HOOKS_OF_MODULES), attributes[1:]))
        facts = [list(map(type, modules)), list(map(len, attributes)), list(map(len, tables))]
        facts += [list(map(itemgetter("training"), attributes)), [kind.forward for kind in self._kinds]]
        facts += [list(map(dict.__contains__, attributes, repeat(name))) for name in REPLACEMENTS_IN_MODULES]
        return list(chain.from_iterable(map(dict.values, tables))), facts

    def _addresses(self) -> list[int]:  # which other libraries' parameters may not have
        return list(map(torch.Tensor.data_ptr, self.parameters)) if self._plain else []

    def _settings(self, model: PreTrainedModel) -> list[Any]:
        config = text_config(model.config)
        of_config = [getattr(config, name, None) for name in _READ_ONCE_OF_CONFIG]
        of_config = [list(value) if isinstance(value, list) else value for value in of_config]  # as they are now
        return [*of_config, *[attributes.get(name) for attributes, name in self._read_once]]


class Origin:
    """The origin of a decoder: the model's parts as they were, and values of its weights.

    Counters and addresses alone don't tell: fused optimisers, `parameter.data` and parameters made in inference mode
    change values without moving `_version`, as do adapters that are put on and merged into the same model. So
    `SAMPLED` values of each parameter, evenly spread, are compared too. A change that moves no counter and touches none
    of them isn't seen, such as a single row of an embedding that is written through `.data`.
    """

    def __init__(self, look: Look) -> None:
        self._look = look
        self._counted = [p for p in self._look.parameters if not p.is_inference()]
        self._versions = versions_of(self._counted)
        self._views = [_spread_values(p) for p in self._look.parameters]
        on_cpu = all(view.device.type == "cpu" for view in self._views)
        self._arrays = [view.view(_INTEGERS[view.element_size()]).numpy() for view in self._views] if on_cpu else None
        self._values = self._sample()

    def still_holds(self, look: Look) -> bool:
        """Whether the model, at which that is the latest look, is what it was."""
        same = look.same_weights_as(self._look) and versions_of(self._counted) == self._versions
        return same and self._sample() == self._values

    def _sample(self) -> bytes:  # as NaN is not equal to itself
        if self._arrays is not None:  # of so many small views much faster than torch.cat
            return b"".join(map(methodcaller("tobytes"), self._arrays))
        sample: bytes = torch.cat(self._views).view(torch.uint8).cpu().numpy().tobytes()
        return sample


def _spread_values(parameter: torch.Tensor) -> torch.Tensor:
    """At most `SAMPLED` values of a parameter, evenly spread, in its own memory."""
    values = parameter.detach()
    span = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    step = max(1, span // SAMPLED)
    return values.as_strided((min(span, SAMPLED),), (step,), values.storage_offset() + (step - 1) // 2)


def why_another_computation(model: PreTrainedModel) -> str | None:
    """What of a model's settings and functions asks for its own forward pass, if anything, whatever its parts are."""
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
    if getattr(model.config, "quantization_config", None) is not None:
        return "its weights are quantised"
    return _changed_functions(model, config)


def _changed_functions(model: PreTrainedModel, config: Any) -> str | None:
    """Which function beside the modules isn't torch's or transformers' own, if any."""
    if hooks_on_all():
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
    """Whose computation isn't that of torch's and transformers' own classes, if anyone's."""
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
        if not kind.__module__.startswith(("torch.nn.modules.", "transformers.")):
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
    """True where a function and what it wraps are torch's, transformers' or Python's own, or wrap for Hub kernels."""
    while function is not None:
        home = getattr(function, "__globals__", {}).get("__name__", "").split(".")[0]
        if home not in ("torch", "transformers", "kernels") and home not in sys.stdlib_module_names:
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _only_watches(hook: Any) -> bool:
    """True for a hook that leaves values as they are: it collects hidden states, or says that gradients are wanted."""
    name, home = getattr(hook, "__name__", ""), getattr(hook, "__module__", None) or ""
    asks_for_gradients = name.startswith("make_inputs_require_grad") and home.split(".")[0] in ("transformers", "peft")
    return home == "transformers.utils.output_capturing" or asks_for_gradients


def _name_of(module: nn.Module, model: PreTrainedModel) -> str:
    return next(name for name, other in model.named_modules() if other is module) or "the model"


def parts_of(model: PreTrainedModel) -> BlockParts | None:
    """The names of its layers' parts; None of a family whose parts aren't known."""
    family = FAMILIES.get(model.config.model_type)
    return family.parts if family is not None else None
