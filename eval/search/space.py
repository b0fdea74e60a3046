"""The schedules that a search tries: all reach the budget, and no two run the same layers."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from torch.quasirandom import SobolEngine

from skipdecode import ConfigError, SkipSchedule, solve_schedule
from skipdecode.schedule.cost import Cost
from skipdecode.schedule.schedule import MAX_HORIZON, Decay, Over, Placement, PromptPolicy

# A schedule may be predicted this much faster than the target: faster ones lose quality for unrequested speed.
MAX_EXCESS = 0.1
# Points drawn per requested schedule before the space counts as exhausted.
DRAWS = 16
# Rates to try for decays that have one: an early decrease, the default, a late decrease or more steps.
RATES: dict[str, tuple[float, ...]] = {
    "power": (0.5, 2.0, 4.0),
    "exponential": (2.0, 4.0, 8.0),
    "step": (2.0, 4.0, 8.0),
}

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class LayerCount(Cost):
    """A step costs the number of layers that it runs, so a speedup of L / K means K layers on average."""

    num_layers: int

    def step_seconds(self, layers: int, step: int, rows: float | None = None) -> float:
        """The number of layers."""
        return float(layers)


@dataclass(frozen=True)
class OverSteps(Cost):
    """A cost that predicts all schedules over the same number of steps, independent of their horizons.

    Over its own horizon, a schedule with a long horizon would look as fast as one with a short horizon, but decode a
    sequence of typical length more slowly. Where the cost knows the distribution of lengths, it is used instead.
    """

    cost: Cost
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_layers", self.cost.num_layers)
        object.__setattr__(self, "margin", self.cost.margin)

    def step_seconds(self, layers: int, step: int, rows: float | None = None) -> float:
        """The time of the underlying cost."""
        return self.cost.step_seconds(layers, step, rows)

    def speedup(self, schedule: SkipSchedule, steps: int | None = None, *, over: Over = "decode") -> float:
        """The speedup over the first `steps` steps; by default `self.steps`, or the lengths that the cost knows."""
        default = self.steps if self.cost.expected_steps is None else None
        return self.cost.speedup(schedule, steps or default, over=over)


@dataclass(frozen=True)
class Budget:
    """The target that every schedule of a search must reach.

    Attributes:
        cost: the cost of decode steps.
        speedup: the target, above 1.
        steps: the number of generated tokens over which speedups are predicted.
        prompt, prompt_stop: the layers of prompts, as in SkipSchedule.
    """

    cost: Cost
    speedup: float
    steps: int
    prompt: PromptPolicy | int = "full"
    prompt_stop: int | None = None

    @property
    def over_steps(self) -> OverSteps:
        """The cost over the steps of the budget."""
        return OverSteps(self.cost, self.steps)

    def predicted(self, schedule: SkipSchedule) -> float:
        """The predicted speedup of a schedule."""
        return self.over_steps.speedup(schedule)


@dataclass(frozen=True)
class Space:
    """The search space of schedules.

    The budgets (max and min) follow from the target and a spread between 0 and 1.

    Raises ConfigError where a dimension is empty, has duplicates or a number out of range.
    """

    warmups: tuple[int, ...]
    decays: tuple[Decay, ...]
    horizons: tuple[int, ...]
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        for name, values in (("warmup", self.warmups), ("horizons", self.horizons)):
            if not values or min(values) < 1 or len(set(values)) != len(values):
                raise ConfigError(f"--{name} is {list(values)}: numbers must be different and at least 1")
            if max(values) > MAX_HORIZON:
                raise ConfigError(f"--{name} is {list(values)}: numbers must be at most {MAX_HORIZON}")
        for name, names in (("decays", self.decays), ("placements", self.placements)):
            if not names or len(set(names)) != len(names):
                raise ConfigError(f"--{name} is {list(names)}: give at least one, without duplicates")


def choose_schedules(
    budget: Budget, space: Space, default: SkipSchedule, *, trials: int, tokens: int, seed: int = 0
) -> list[SkipSchedule]:
    """At most `trials` schedules that reach a budget, the default first, spread evenly over a space.

    The points of a scrambled Sobol sequence determine warm-up, decay, rate, horizon, placement and spread;
    `solve_schedule` finds the budgets. A schedule is skipped if it can't reach the target, is predicted more than
    MAX_EXCESS faster than the target and faster than the default, or runs the same layers as a chosen one for each of
    the first `tokens` tokens.

    Raises:
        ConfigError: where no schedule besides the default is left.
    """
    cost, ceiling = budget.over_steps, max(budget.speedup * (1 + MAX_EXCESS), budget.predicted(default))
    chosen = {behaviour(default, tokens): default}
    reasons: dict[str, None] = {}  # used as an ordered set
    for point in SobolEngine(6, scramble=True, seed=seed).draw(DRAWS * trials).tolist():
        if len(chosen) >= trials:
            break
        decay = _pick(space.decays, point[1])
        rate = _pick(RATES[decay], point[2]) if decay in RATES else None
        try:
            schedule = solve_schedule(
                cost,
                budget.speedup,
                horizon=_pick(space.horizons, point[3]),
                warmup_layers=_pick(space.warmups, point[0]),
                decay=decay,
                decay_rate=rate,
                placement=_pick(space.placements, point[4]),
                prompt=budget.prompt,
                prompt_stop=budget.prompt_stop,
                spread=point[5],
            )
        except ConfigError as error:
            reasons[str(error)] = None
            continue
        if budget.predicted(schedule) > ceiling:
            reasons[f"the nearest schedules are predicted more than {MAX_EXCESS:.0%} faster than the target"] = None
            continue
        chosen.setdefault(behaviour(schedule, tokens), schedule)
    if len(chosen) == 1:
        why = next(iter(reasons), "all schedules drawn run the same layers as the default")
        raise ConfigError(f"no schedule besides the default reaches the target in this space: {why}")
    return list(chosen.values())


def behaviour(schedule: SkipSchedule, tokens: int) -> Hashable:
    """The layers of the prompt and of the first `tokens` generated tokens, to compare schedules by."""
    prompt = schedule.prompt_layers, schedule.prompt_depth
    return schedule.num_layers, *prompt, tuple(schedule.layers_at(i) for i in range(tokens))


def spread_of(schedule: SkipSchedule) -> float:
    """The spread of the budgets, as in `solve_schedule`: (max - min) / (max + min)."""
    return (schedule.max_layers - schedule.min_layers) / (schedule.max_layers + schedule.min_layers)


def _pick(choices: tuple[Choice, ...], share: float) -> Choice:
    return choices[min(int(share * len(choices)), len(choices) - 1)]
