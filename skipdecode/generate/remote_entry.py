"""What transformers calls for `generate(custom_generate=REPOSITORY)`: see `skipdecode.checkpoint.remote_code`."""

import copy
from typing import Any

from transformers import GenerationMixin

from skipdecode.checkpoint.skip_config import DEFAULT_SPEEDUP
from skipdecode.errors import ConfigError
from skipdecode.families import longest_sequence
from skipdecode.generate.skip_generate import skip_generate

_ASKED = ("schedule", "speedup", "over", "strict", "lossless", "order", "weights", "cuda_graphs")


def generate(*args: Any, model: Any, **kwargs: Any) -> Any:
    """`model.generate(...)` with layers skipped.

    Takes what `generate` takes, and `speedup` or `schedule`, `over`, `strict`, `lossless`, `weights` and `cuda_graphs`
    as `skip_generate` does. They may also stand in the generation config that is passed, as servers do that know of
    none (`transformers serve`: `"generation_config": "{\\"speedup\\": 3}"` in a request). With neither a speedup nor a
    schedule the text is decoded at the checkpoint's own speed, `default_speedup` of its `generation_config.json`;
    without one all layers run and it is `generate` itself. `speedup=1` is full depth always.

    Raises what `skip_generate` raises.
    """
    passed = kwargs.get("generation_config")
    for name in _ASKED:
        if kwargs.get(name) is None and getattr(passed, name, None) is not None:
            kwargs[name] = getattr(passed, name)
    default = getattr(model.generation_config, DEFAULT_SPEEDUP, None)
    skips = kwargs.get("speedup") is not None or kwargs.get("schedule") is not None or bool(kwargs.get("lossless"))
    by_default = not skips and default is not None
    if by_default:
        kwargs["speedup"] = default
    # Not model.generate: of a model that was loaded with trust_remote_code it is this function.
    kwargs["custom_generate"] = skip_generate if skips or by_default else None
    if kwargs["custom_generate"] is None:
        kwargs.pop("strict", None)  # full depth is always reached
    if passed is not None and kwargs["custom_generate"] is not None:
        kwargs["generation_config"] = _within_positions(model, passed, *args, **kwargs)
    try:
        return GenerationMixin.generate(model, *args, **kwargs)
    except ConfigError as error:
        if not by_default:
            raise
        own = str(default).removesuffix(".0")  # whatever its owner has written
        raise ConfigError(f"{error} (at the checkpoint's own speed, {own}x; speedup=1 is full depth)") from error


def _within_positions(model: Any, passed: Any, inputs: Any = None, **kwargs: Any) -> Any:
    """A generation config that asks for no more tokens than the model has positions left behind the prompt.

    `transformers serve` asks for 1,024 at least where a request names no limit.
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
