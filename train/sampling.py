"""The schedules that a training step runs: a distribution over schedules, drawn as a pure function of (seed, step)."""

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from skipdecode import ConfigError, CostModel, SkipSchedule
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.schedule.machine_profile import Profile
from train.recipe import Sampling

# A range of targets is drawn from as many evenly spaced ones as this, so that a checkpoint can name them all.
RANGE_TARGETS = 31

USUAL_SPEEDUP = 2.0  # of a checkpoint that is asked for none


class Draw(NamedTuple):
    """A target speedup and the schedule that is to reach it."""

    speedup: float
    schedule: SkipSchedule


@dataclass(frozen=True)
class ScheduleSampler:
    """Draws the schedules of training steps.

    `at(step)` depends on seed and step alone, so every rank and every resumed run draws the same in the same step.

    One schedule a step; all of them; or the slowest, the fastest and one drawn between them, the sandwich of
    universally slimmable networks (Yu and Huang 2019, arXiv 1903.05134): the widest bounds what all others reach, the
    narrowest bounds them from below.
    """

    speedups: tuple[float, ...]
    schedules: tuple[SkipSchedule, ...]
    weights: tuple[float, ...]
    seed: int
    sampling: Sampling = "one"

    def at(self, step: int) -> tuple[Draw, ...]:
        """The draws that the step (0-based) runs, slowest first."""
        # A string is hashed the same on every platform and in every version of Python; an int or a tuple is not.
        generator = random.Random(f"schedule:{self.seed}:{step}")
        drawn = range(len(self.schedules))
        ends: set[int] = set()
        if self.sampling == "all":
            ends = set(drawn)
        elif self.sampling == "sandwich":
            ends = {min(drawn, key=self.speedups.__getitem__), max(drawn, key=self.speedups.__getitem__)}
        between = [index for index in drawn if index not in ends and self.weights[index] > 0]
        if between:
            ends.add(generator.choices(between, weights=[self.weights[index] for index in between])[0])
        draws = [Draw(self.speedups[index], self.schedules[index]) for index in ends]
        return tuple(sorted(draws, key=lambda draw: draw.speedup))


def make_sampler(
    cost: CostModel,
    *,
    speedups: Sequence[float] | None = None,
    speedup_range: Sequence[float] | None = None,
    schedules: Sequence[SkipSchedule] | None = None,
    weights: Sequence[float] | None = None,
    sampling: Sampling = "one",
    seed: int,
    solver: Mapping[str, Any],
    profile: Profile | None = None,
) -> ScheduleSampler:
    """A sampler over a list of target speedups or of schedules, with weights, or over a range of targets.

    Targets are solved with the settings in `solver`, by a machine's `profile` where there is one; the target of a
    schedule that is given is its predicted speedup.
    Raises ConfigError unless exactly one of the three is given, for a target out of reach, a schedule of another depth.
    """
    if sum(given is not None for given in (speedups, speedup_range, schedules)) != 1:
        raise ConfigError(
            "schedule needs exactly one of speedups (a list), speedup_range ([lowest, highest]) and files; "
            "set the others to null"
        )
    if speedup_range is not None:
        if len(speedup_range) != 2 or not 1 <= speedup_range[0] < speedup_range[1] < math.inf:
            raise ConfigError(f"schedule.speedup_range is {list(speedup_range)}: expected [lowest, highest], 1 or more")
        if sampling == "all":
            raise ConfigError(
                f"schedule.sampling is 'all' with schedule.speedup_range, which stands for {RANGE_TARGETS} targets: "
                "name some in schedule.speedups"
            )
        low, high = speedup_range
        between = [low + (high - low) * n / (RANGE_TARGETS - 1) for n in range(1, RANGE_TARGETS - 1)]
        speedups = [low, *(float(f"{speedup:g}") for speedup in between), high]  # of digits that one would ask for
    config = SkipConfig(solver=solver)
    if schedules is not None:
        bound = config.cost_for(cost, profile=profile)
        speedups = [round(bound.speedup(schedule, over=config.over), 2) for schedule in schedules]
    assert speedups is not None
    if not speedups:
        raise ConfigError(
            "schedule has nothing to draw from: name one target or file at least, such as speedups=[1,2,4]"
        )
    if len(set(speedups)) != len(speedups):
        raise ConfigError(f"schedule targets {list(speedups)}: each once; use schedule.weights to favour one")
    weights = [1.0] * len(speedups) if weights is None else weights
    if len(weights) != len(speedups) or not all(w > 0 for w in weights) or not sum(weights) < math.inf:
        raise ConfigError(
            f"schedule.weights is {list(weights)}: expected {len(speedups)} weights above 0; a target that is never "
            "drawn is left out, for the checkpoint would name it as trained"
        )
    return ScheduleSampler(
        speedups=tuple(float(s) for s in speedups),
        schedules=tuple(schedules or (config.plan_for(cost, s, profile=profile).schedule for s in speedups)),
        weights=tuple(float(w) for w in weights),
        seed=seed,
        sampling=sampling,
    )


def default_speedup(asked: float | None, speedups: Collection[float]) -> float | None:
    """The speed that a checkpoint decodes at where nobody asks for one; None for one that knows full depth alone.

    Args:
        asked: by the recipe; None: USUAL_SPEEDUP, or the nearest that was trained for.
        speedups: targets that were trained for.

    Raises:
        ConfigError: for a speed beyond them.

    >>> default_speedup(None, [1, 2.5, 4]), default_speedup(None, [3, 4]), default_speedup(None, [1])
    (2.0, 3, None)
    """
    slowest, fastest = min(speedups, default=1.0), max(speedups, default=1.0)
    if asked is not None and not slowest <= asked <= fastest:
        raise ConfigError(
            f"schedule.default_speedup is {asked:g}: it must lie between {slowest:g} and {fastest:g}, which are "
            "trained for"
        )
    speedup = min(max(USUAL_SPEEDUP, slowest), fastest) if asked is None else asked
    return None if fastest == 1 else speedup
