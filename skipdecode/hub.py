"""The function that transformers calls for `generate(custom_generate=REPOSITORY)`: see `skipdecode.bundle`."""

from typing import Any

from transformers import GenerationMixin

from skipdecode.decode import skip_generate


def generate(*args: Any, model: Any, **kwargs: Any) -> Any:
    """`model.generate(...)` with layers skipped.

    Takes what `generate` takes, and `speedup` or `schedule`, `lossless`, `weights` and `cuda_graphs` as `skip_generate`
    does; with neither a speedup nor a schedule, all layers run and it is `generate` itself. Raises what `skip_generate`
    raises.
    """
    skips = kwargs.get("speedup") is not None or kwargs.get("schedule") is not None or kwargs.get("lossless")
    # Not model.generate: of a model that was loaded with trust_remote_code it is this function.
    kwargs["custom_generate"] = skip_generate if skips else None
    return GenerationMixin.generate(model, *args, **kwargs)
