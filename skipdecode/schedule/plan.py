"""What a target speedup becomes on a machine: the schedule that decodes, and the speed that is expected of it."""

import math
from dataclasses import dataclass

from skipdecode.errors import ConfigError
from skipdecode.schedule.schedule import SkipSchedule

PLANNED_HEADER = "X-Skipdecode-Planned-Speedup"  # of a server's answers


@dataclass(frozen=True)
class SpeedPlan:
    """The schedule for a target, and what it is expected to reach.

    A target that can't be reached is decoded at the fastest schedule that the checkpoint was trained for.

    Attributes:
        schedule: that decodes.
        target: the speedup that was asked for; None where a schedule was given in its place.
        speedup: that is expected of the schedule, of the time that the target is of; at least the target where that is
            reached. None where a schedule was given.
        limit: the largest speedup that could be asked for in place of a target that can't be reached; None for one that
            is reached.
        clock: what speeds are expected by, in words.
    """

    schedule: SkipSchedule
    target: float | None = None
    speedup: float | None = None
    limit: float | None = None
    clock: str = ""

    @property
    def reached(self) -> bool:
        """Whether the target is expected to be reached; True where a schedule was given."""
        return self.limit is None

    @property
    def planned(self) -> float | None:
        """`speedup` to two decimals, never rounded up: an unreached target must not look like a reached one."""
        return None if self.speedup is None else rounded_down(self.speedup)

    @property
    def shortfall(self) -> float | None:
        """What is planned in place of a target that can't be reached; None for one that is."""
        return None if self.reached else self.planned

    def warning(self) -> str:
        """Say that the target can't be reached and what decodes in its place. For plans that aren't `reached`."""
        return (
            f"speedup {self.target:g} can't be reached: the fastest schedule that this checkpoint was trained for "
            f"decodes in its place, at {self.planned:.2f}x by {self.clock}"
        )

    def refusal(self) -> ConfigError:
        """The error of whoever asked for the target strictly. For plans that aren't `reached`."""
        return ConfigError(
            f"speedup is {self.target:g}: this checkpoint reaches {self.limit:.2f} at most by {self.clock}; ask for "
            "less, or leave strict out, and the fastest schedule that it was trained for decodes"
        )


def rounded_down(speedup: float) -> float:
    """A speedup to two decimals, not above itself.

    >>> rounded_down(2.9999), rounded_down(2.3)
    (2.99, 2.3)
    """
    return math.floor(speedup * 100 + 1e-6) / 100


def show_planned(target: float, shortfall: float | None) -> str:
    """A target such as `3x`, with what was planned in its place where it can't be reached.

    >>> show_planned(3, None), show_planned(3, 1.87)
    ('3x', '3x (planned 1.87x)')
    """
    return f"{target:g}x" if shortfall is None else f"{target:g}x (planned {shortfall:.2f}x)"
