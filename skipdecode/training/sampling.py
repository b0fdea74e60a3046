"""The schedules of each training step, sampled as a pure function of (seed, step)."""

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.errors import ConfigError
from skipdecode.schedule.cost import CostModel
from skipdecode.schedule.machine_profile import Profile
from skipdecode.schedule.schedule import Sampling, SkipSchedule

# A range is represented by this many evenly spaced targets, so that the checkpoint can save a schedule for each.
RANGE_TARGETS = 31

USUAL_SPEEDUP = 2.0  # the default of a checkpoint, if it was trained for it


class Draw(NamedTuple):
    """A target speedup and the schedule solved for it."""

    speedup: float
    schedule: SkipSchedule


@dataclass(frozen=True)
class ScheduleSampler:
    """Samples the schedules of training steps.

    `at(step)` depends only on the seed and the step, so every rank and every resumed run gets the same schedules in the
    same step. With sampling "one" a step has one schedule; with "all", all of them; with "sandwich", the slowest, the
    fastest and one sampled in between, which is the sandwich rule of universally slimmable networks (Yu and Huang 2019,
    arXiv 1903.05134).
    """

    speedups: tuple[float, ...]
    schedules: tuple[SkipSchedule, ...]
    weights: tuple[float, ...]
    seed: int
    sampling: Sampling = "one"

    def at(self, step: int) -> tuple[Draw, ...]:
        """The targets and schedules that a step (0-based) runs, slowest first."""
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

    def schedules_at(self, step: int) -> tuple[SkipSchedule, ...]:
        """The schedules that a step (0-based) runs, slowest first."""
        return tuple(draw.schedule for draw in self.at(step))

    def skip_config(
        self, solver: Mapping[str, Any], base_model: str | None = None, task: Mapping[str, Any] | None = None
    ) -> SkipConfig:
        """What a checkpoint that is trained under these schedules saves; arguments as in `SkipConfig`."""
        return SkipConfig(dict(zip(self.speedups, self.schedules, strict=True)), solver, task or {}, base_model)


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
    """Make a sampler over target speedups, a range of them, or given schedules.

    Args:
        cost: the cost model of the model.
        speedups: a list of targets.
        speedup_range: the lowest and the highest target.
        schedules: a list of schedules; the target of each is its predicted speedup.
        weights: the relative frequency of each target or schedule; None: equal.
        sampling: how many schedules a step runs, as in `ScheduleSampler`.
        seed: the seed of the sampling.
        solver: settings with which targets are solved.
        profile: the calibrated profile by which targets are solved; None: the analytical cost model.

    Raises:
        ConfigError: unless exactly one of speedups, speedup_range and schedules is given; for an unreachable target;
            and for a schedule for another number of layers.
    """
    if sum(given is not None for given in (speedups, speedup_range, schedules)) != 1:
        raise ConfigError(
            "schedules need exactly one of speedups (a list), speedup_range ([lowest, highest]) and schedules (files, "
            "in a recipe)"
        )
    if speedup_range is not None:
        if len(speedup_range) != 2 or not 1 <= speedup_range[0] < speedup_range[1] < math.inf:
            raise ConfigError(
                f"speedup_range is {list(speedup_range)}: expected [lowest, highest], 1 <= lowest < highest"
            )
        if sampling == "all":
            raise ConfigError(
                f"sampling is 'all' with speedup_range, which means {RANGE_TARGETS} targets: list fewer in speedups"
            )
        low, high = speedup_range
        between = [low + (high - low) * n / (RANGE_TARGETS - 1) for n in range(1, RANGE_TARGETS - 1)]
        speedups = [low, *(float(f"{speedup:g}") for speedup in between), high]  # rounded, for users to request
    config = SkipConfig(solver=solver)
    if schedules is not None:
        bound = config.cost_for(cost, profile=profile)
        speedups = [round(bound.speedup(schedule, over=config.over), 2) for schedule in schedules]
    assert speedups is not None
    if not speedups:
        raise ConfigError("there are no target speedups: list at least one target or schedule, such as speedups=[1,2]")
    if len(set(speedups)) != len(speedups):
        raise ConfigError(
            f"target speedups are {list(speedups)}: list each once, and use weights to sample one more often"
        )
    weights = [1.0] * len(speedups) if weights is None else weights
    if len(weights) != len(speedups) or not all(w > 0 for w in weights) or not sum(weights) < math.inf:
        raise ConfigError(
            f"weights is {list(weights)}: expected {len(speedups)} weights above 0; remove a target that "
            "should never be sampled"
        )
    return ScheduleSampler(
        speedups=tuple(float(s) for s in speedups),
        schedules=tuple(schedules or (config.plan_for(cost, s, profile=profile).schedule for s in speedups)),
        weights=tuple(float(w) for w in weights),
        seed=seed,
        sampling=sampling,
    )


def settings_of(schedules: Sequence[SkipSchedule]) -> dict[str, Any]:
    """The solver settings with which other batch sizes and speeds get schedules of the same kind as these.

    Raises ConfigError where the schedules differ in such a setting.
    """
    skipping = [schedule for schedule in schedules if schedule.skips]
    if not skipping:
        return {}
    kind: dict[str, Any] = {}
    for name in ("placement", "order", "decay", "decay_rate", "warmup_layers", "prompt_stop"):
        values = list(dict.fromkeys(getattr(schedule, name) for schedule in skipping))
        if len(values) > 1:
            raise ConfigError(
                f"the schedules differ in {name} ({values[0]} and {values[1]}): a checkpoint needs a single value to "
                "solve schedules for other batch sizes; train one checkpoint for each value"
            )
        kind |= {name: values[0]} if values[0] is not None else {}
    if "order" in kind:
        kind["order"] = list(kind["order"])  # a list, as JSON reads it back
    prompts = [schedule.prompt for schedule in skipping]
    layers = [prompt for prompt in prompts if not isinstance(prompt, str)]  # the solver may have lowered some
    kind["prompt"] = "full" if "full" in prompts else max(layers) if layers else "max"
    return kind


def default_speedup(requested: float | None, speedups: Collection[float]) -> float | None:
    """The speed at which a checkpoint decodes where the caller names none.

    Args:
        requested: the speed that the user chose; None: USUAL_SPEEDUP, or the nearest trained target.
        speedups: the trained targets.

    Returns:
        None for a checkpoint that was trained at full depth alone.

    Raises:
        ConfigError: for a speed outside the trained range.

    >>> default_speedup(None, [1, 2.5, 4]), default_speedup(None, [3, 4]), default_speedup(None, [1])
    (2.0, 3, None)
    """
    slowest, fastest = min(speedups, default=1.0), max(speedups, default=1.0)
    if requested is not None and not slowest <= requested <= fastest:
        raise ConfigError(
            f"default_speedup is {requested:g}: it must lie between {slowest:g} and {fastest:g}, the slowest "
            "and the fastest trained target"
        )
    speedup = min(max(USUAL_SPEEDUP, slowest), fastest) if requested is None else requested
    return None if fastest == 1 else speedup
