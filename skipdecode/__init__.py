"""skipdecode: faster decoding of language models, which skip layers as they generate (arXiv 2307.02628).

Seven invariants hold throughout (docs/how-it-works.md explains them):

1. Nested: the layers of token i + 1 are a subset of those of token i, so no key or value is ever missing.
2. 1 <= warmup_layers <= min_layers <= max_layers <= num_layers: some of the lowest layers always run.
3. Prefix: the tokens that run layer l are the first c(l) positions, so training runs it on `hidden[:, :c(l)]` only.
4. The same schedule everywhere: a checkpoint stores the schedules that trained it and decodes with them, on every
   process.
5. Cached = uncached: decoding gives, token for token, what a forward pass over the complete sequence gives; a batch
   gives what each of its sequences gives alone; a schedule of all layers gives what `model.generate` gives.
6. Planned memory: layer l caches the prompt and c(l) tokens, and nothing after the prefill where no token runs it.
7. Nested batches: sorted by budget, deepest first, the sequences that run layer l in a step are the first of the batch,
   whatever their positions and speedups; a sequence past its cutoff in a layer never reads its keys and values there
   again.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skipdecode.checkpoint.loading import load
    from skipdecode.engine.engine import Engine
    from skipdecode.errors import ConfigError
    from skipdecode.fastpath.kv_cache import PlannedCache
    from skipdecode.gating import skip_layers
    from skipdecode.generate.skip_generate import skip_generate
    from skipdecode.schedule.cost import CostModel, Machine, MeasuredCost
    from skipdecode.schedule.schedule import SkipSchedule
    from skipdecode.schedule.solver import solve_schedule
    from skipdecode.timing.calibrate import measure_cost

__all__ = [
    "ConfigError",
    "CostModel",
    "Engine",
    "Machine",
    "MeasuredCost",
    "PlannedCache",
    "SkipSchedule",
    "load",
    "measure_cost",
    "skip_generate",
    "skip_layers",
    "solve_schedule",
]

# Public names are imported when they are first used: schedules don't need torch, and a command with an invalid name
# should fail at once and not after seconds of imports.
_HOMES = {
    "ConfigError": "errors",
    "CostModel": "schedule.cost",
    "Engine": "engine.engine",
    "Machine": "schedule.cost",
    "MeasuredCost": "schedule.cost",
    "PlannedCache": "fastpath.kv_cache",
    "load": "checkpoint.loading",
    "measure_cost": "timing.calibrate",
    "SkipSchedule": "schedule.schedule",
    "skip_generate": "generate.skip_generate",
    "skip_layers": "gating",
    "solve_schedule": "schedule.solver",
}


def _lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of a package whose names are imported when they are used (PEP 562).

    Args:
        package: the package's `__name__`.
        homes: for each public name, the module within the package that defines it.

    `__getattr__` raises AttributeError for other names.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names


__getattr__, __dir__ = _lazy_names(__name__, _HOMES)
