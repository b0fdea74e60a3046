"""Speed plans: the schedule chosen for a target speedup, and the speedup that is predicted for it."""

import math
from dataclasses import dataclass

from skipdecode.errors import ConfigError, renamed
from skipdecode.schedule.schedule import SkipSchedule

PLANNED_HEADER = "X-Skipdecode-Planned-Speedup"  # HTTP header of a server's responses


@dataclass(frozen=True)
class SpeedPlan:
    """The schedule for a target speedup, and the speedup that is predicted for it.

    For a target that can't be reached, the schedule is the fastest one that the checkpoint was trained for.

    Attributes:
        schedule: the schedule to decode with.
        target: the target speedup; None where a schedule was given instead of one.
        speedup: the predicted speedup of the schedule, of decoding or end-to-end like the target; at least the target
            where that is reached. None where a schedule was given.
        limit: for a target that can't be reached, the largest speedup that can; None where the target is reached.
        predicted_by: the name of the cost model that predicts, for messages.
    """

    schedule: SkipSchedule
    target: float | None = None
    speedup: float | None = None
    limit: float | None = None
    predicted_by: str = ""

    @property
    def reached(self) -> bool:
        """Whether the target is predicted to be reached; True where a schedule was given."""
        return self.limit is None

    @property
    def planned(self) -> float | None:
        """`speedup` rounded down to two decimals, so that an unreached target never looks reached."""
        return None if self.speedup is None else rounded_down(self.speedup)

    @property
    def fallback_speedup(self) -> float | None:
        """The planned speedup where it is below the target; None where the target is reached."""
        return None if self.reached else self.planned

    shortfall = renamed("shortfall", "fallback_speedup")
    clock = renamed("clock", "predicted_by")

    def warning(self) -> str:
        """The warning that the target can't be reached. Only for plans that aren't `reached`."""
        return (
            f"speedup {self.target:g} can't be reached: the fastest schedule that this checkpoint was trained for is "
            f"used instead, {self.planned:.2f}x by {self.predicted_by}"
        )

    def refusal(self) -> ConfigError:
        """The error where a target must be reached (`strict`). Only for plans that aren't `reached`."""
        return ConfigError(
            f"speedup is {self.target:g}: this checkpoint reaches at most {self.limit:.2f} by {self.predicted_by}; "
            "choose a lower speedup, or omit strict to decode with the fastest schedule that it was trained for"
        )


def rounded_down(speedup: float) -> float:
    """Round a speedup down to two decimals; a value within 1e-8 below a hundredth counts as that hundredth.

    >>> rounded_down(2.9999), rounded_down(2.3)
    (2.99, 2.3)
    """
    return math.floor(speedup * 100 + 1e-6) / 100


def show_planned(target: float, planned: float | None) -> str:
    """Format a target such as `3x`, with the planned speedup where it can't be reached.

    >>> show_planned(3, None), show_planned(3, 1.87)
    ('3x', '3x (planned 1.87x)')
    """
    return f"{target:g}x" if planned is None else f"{target:g}x (planned {planned:.2f}x)"
