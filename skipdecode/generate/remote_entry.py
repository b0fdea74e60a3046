"""The function behind `generate(custom_generate=REPOSITORY)`; `skipdecode.checkpoint.remote_code` ships it."""

import copy
from typing import Any

from transformers import GenerationMixin

from skipdecode.checkpoint.skip_config import DEFAULT_SPEEDUP
from skipdecode.errors import ConfigError
from skipdecode.families import longest_sequence
from skipdecode.generate.skip_generate import skip_generate

_ARGUMENTS = ("schedule", "speedup", "over", "strict", "lossless", "order", "weights", "cuda_graphs")


def generate(*args: Any, model: Any, **kwargs: Any) -> Any:
    """Call `model.generate(...)` with layers skipped.

    It takes the arguments of `generate`, and `speedup` or `schedule`, `over`, `strict`, `lossless`, `order`, `weights`
    and `cuda_graphs` as `skip_generate` does. These may also be fields of the generation config that is passed, for
    servers that don't know them (`transformers serve`: `"generation_config": "{\\"speedup\\": 3}"` in a request). With
    neither a speedup nor a schedule, the checkpoint's own speed applies: `default_speedup` in its
    `generation_config.json`. Without that, all layers run by `generate` itself. `speedup=1` always means full depth.
    Raises ConfigError as `skip_generate` does.
    """
    passed = kwargs.get("generation_config")
    for name in _ARGUMENTS:
        if kwargs.get(name) is None and getattr(passed, name, None) is not None:
            kwargs[name] = getattr(passed, name)
    default = getattr(model.generation_config, DEFAULT_SPEEDUP, None)
    skips = kwargs.get("speedup") is not None or kwargs.get("schedule") is not None or bool(kwargs.get("lossless"))
    by_default = not skips and default is not None
    if by_default:
        kwargs["speedup"] = default
    # Not model.generate, which is this function if the model was loaded with trust_remote_code.
    kwargs["custom_generate"] = skip_generate if skips or by_default else None
    if kwargs["custom_generate"] is None:
        kwargs.pop("strict", None)  # full depth can always be reached
    if passed is not None and kwargs["custom_generate"] is not None:
        kwargs["generation_config"] = _within_positions(model, passed, *args, **kwargs)
    try:
        return GenerationMixin.generate(model, *args, **kwargs)
    except ConfigError as error:
        if not by_default:
            raise
        own = str(default).removesuffix(".0")  # it may be anything
        raise ConfigError(f"{error} (at the checkpoint's own speed, {own}x; speedup=1 is full depth)") from error


def _within_positions(model: Any, passed: Any, inputs: Any = None, **kwargs: Any) -> Any:
    """The generation config with no more new tokens than the model has positions for.

    `transformers serve` sets at least 1,024 new tokens if a request names no limit.
    """
    ids = kwargs.get("input_ids") if inputs is None else inputs
    positions = longest_sequence(model.config)
    if ids is None or positions is None or passed.max_new_tokens is None:
        return passed
    room = positions - ids.shape[-1] + 1  # the last token is never an input
    if not 0 < room < passed.max_new_tokens:
        return passed
    limited = copy.deepcopy(passed)
    limited.max_new_tokens = room
    return limited
