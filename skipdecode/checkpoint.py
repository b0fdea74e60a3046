"""What a checkpoint remembers beside its weights: the schedules that it was trained under, and for what."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skipdecode.cost import Cost
from skipdecode.errors import ConfigError
from skipdecode.schedule import SkipSchedule
from skipdecode.solver import solve_schedule

FILE_NAME = "skipdecode.json"
_FORMAT = 1


@dataclass(frozen=True)
class SkipConfig:
    """The schedules of a checkpoint (law 4): what trained it is what decodes with it.

    Attributes:
        schedules: target speedup -> the schedule that training drew for it.
        solver: the keyword arguments of `solve_schedule` that made them; any other target is solved with the same.
        task: name and options of the task that the checkpoint was trained on; plain values.
    """

    schedules: Mapping[float, SkipSchedule] = field(default_factory=dict)
    solver: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)

    def schedule_for(self, cost: Cost, speedup: float) -> SkipSchedule:
        """The schedule of a target: the one trained under where there is one, else one solved the same way."""
        return self.schedules.get(float(speedup)) or solve_schedule(cost, speedup, **self.solver)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `skipdecode.json` into a checkpoint folder, whole or not at all."""
        values = {
            "format": _FORMAT,
            "schedules": {f"{speedup:g}": schedule.to_dict() for speedup, schedule in self.schedules.items()},
            "solver": dict(self.solver),
            "task": dict(self.task),
        }
        path = Path(folder) / FILE_NAME
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "SkipConfig | None":
        """What `save` wrote into the folder; None where there is no such file. Raises ConfigError if damaged."""
        path = Path(folder) / FILE_NAME
        if not path.exists():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["format"] != _FORMAT:
                raise ConfigError(f"{path} has format {values['format']}: this version reads format {_FORMAT}")
            schedules = {float(s): SkipSchedule.from_dict(v) for s, v in values["schedules"].items()}
            return cls(schedules=schedules, solver=values["solver"], task=values["task"])
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error})") from error
