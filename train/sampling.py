"""Which schedule a training step runs: a distribution over schedules, drawn as a pure function of (seed, step)."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skipdecode import ConfigError, CostModel, SkipSchedule, solve_schedule

# A range of targets is drawn from as many evenly spaced ones as this, so that a checkpoint can name them all.
RANGE_TARGETS = 31


@dataclass(frozen=True)
class ScheduleSampler:
    """Draws (target speedup, schedule) pairs.

    `at(step)` depends on seed and step alone, so every rank and every resumed run draws the same in the same step.
    """

    speedups: tuple[float, ...]
    schedules: tuple[SkipSchedule, ...]
    weights: tuple[float, ...]
    seed: int

    def at(self, step: int) -> tuple[float, SkipSchedule]:
        """The target speedup and the schedule of a step (0-based)."""
        # A string is hashed the same on every platform and in every version of Python; an int or a tuple is not.
        draw = random.Random(f"schedule:{self.seed}:{step}")
        index = draw.choices(range(len(self.schedules)), weights=self.weights)[0]
        return self.speedups[index], self.schedules[index]


def make_sampler(
    cost: CostModel,
    *,
    speedups: Sequence[float] | None,
    weights: Sequence[float] | None,
    speedup_range: Sequence[float] | None,
    seed: int,
    solver: Mapping[str, Any],
) -> ScheduleSampler:
    """A sampler over a list of target speedups with weights, or over a range of them.

    Raises ConfigError unless exactly one of `speedups` and `speedup_range` is given, and for a target out of reach.
    """
    if (speedups is None) == (speedup_range is None):
        raise ConfigError("schedule needs either speedups (a list) or speedup_range ([lowest, highest]), and not both")
    if speedup_range is not None:
        if len(speedup_range) != 2 or not 1 <= speedup_range[0] < speedup_range[1]:
            raise ConfigError(f"schedule.speedup_range is {list(speedup_range)}: expected [lowest, highest], 1 or more")
        if weights is not None:
            raise ConfigError("schedule.weights goes with schedule.speedups; a range is drawn from evenly")
        low, high = speedup_range
        speedups = [low + (high - low) * n / (RANGE_TARGETS - 1) for n in range(RANGE_TARGETS)]
    assert speedups is not None
    if not speedups:
        raise ConfigError("schedule.speedups is empty: name one target or more, such as [1, 2, 4]")
    if len(set(speedups)) != len(speedups):
        raise ConfigError(
            f"schedule.speedups is {list(speedups)}: each target once; use schedule.weights to favour one"
        )
    weights = [1.0] * len(speedups) if weights is None else weights
    if len(weights) != len(speedups) or min(weights) < 0 or sum(weights) <= 0:
        raise ConfigError(f"schedule.weights is {list(weights)}: expected {len(speedups)} weights, none below 0")
    return ScheduleSampler(
        speedups=tuple(float(s) for s in speedups),
        schedules=tuple(solve_schedule(cost, s, **solver) for s in speedups),
        weights=tuple(float(w) for w in weights),
        seed=seed,
    )
