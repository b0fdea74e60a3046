"""skipdecode: decoder language models that skip layers as they generate, faster on the clock (arXiv 2307.02628)."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skipdecode.attach import skip_layers
    from skipdecode.cache import PlannedCache
    from skipdecode.calibrate import measure_cost
    from skipdecode.cost import CostModel, Machine, MeasuredCost
    from skipdecode.decode import skip_generate
    from skipdecode.errors import ConfigError
    from skipdecode.loading import load
    from skipdecode.schedule import SkipSchedule
    from skipdecode.solver import solve_schedule

__all__ = [
    "ConfigError",
    "CostModel",
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

# Public names are imported when they are first used: a schedule needs no torch, and a command line that is told a wrong
# name should not take seconds to say so.
_HOMES = {
    "ConfigError": "errors",
    "CostModel": "cost",
    "Machine": "cost",
    "MeasuredCost": "cost",
    "PlannedCache": "cache",
    "load": "loading",
    "measure_cost": "calibrate",
    "SkipSchedule": "schedule",
    "skip_generate": "decode",
    "skip_layers": "attach",
    "solve_schedule": "solver",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
