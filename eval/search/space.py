"""The schedules that a search tries: each reaches the same budget, and no two skip the same layers."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from torch.quasirandom import SobolEngine

from skipdecode import ConfigError, SkipSchedule, solve_schedule
from skipdecode.schedule.cost import Cost
from skipdecode.schedule.schedule import MAX_HORIZON, Decay, Over, Placement, PromptPolicy

# How much faster than the target a schedule may be predicted: one that is faster still pays for what nobody asked for.
ROOM = 0.1
# Points drawn for each schedule that is asked for, before a space counts as used up.
DRAWS = 16
# The rates that are tried of the decays that have one: a drop early, the default, a drop late or in more steps.
RATES: dict[str, tuple[float, ...]] = {
    "power": (0.5, 2.0, 4.0),
    "exponential": (2.0, 4.0, 8.0),
    "step": (2.0, 4.0, 8.0),
}

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class LayerCount(Cost):
    """A step costs the layers that it runs: for a budget in layers, since a speedup of L / K is K layers on average."""

    num_layers: int

    def step_seconds(self, layers: int, step: int, rows: float | None = None) -> float:
        """The number of layers."""
        return float(layers)


@dataclass(frozen=True)
class OverSteps(Cost):
    """A cost that predicts every schedule over the same number of steps, whatever its horizon.

    Over its own horizon a schedule with a long one would look as fast as one with a short one, and decode a text of
    the usual length more slowly, since most of its saving is still to come. Where the cost knows how long texts are,
    those are the steps, as they are for the schedule that the checkpoint decodes by.
    """

    cost: Cost
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_layers", self.cost.num_layers)
        object.__setattr__(self, "margin", self.cost.margin)

    def step_seconds(self, layers: int, step: int, rows: float | None = None) -> float:
        """The time that the cost itself gives."""
        return self.cost.step_seconds(layers, step, rows)

    def speedup(self, schedule: SkipSchedule, steps: int | None = None, *, over: Over = "decode") -> float:
        """The speed of texts, or of the first `self.steps` steps, over full depth's, unless others are asked for."""
        usual = self.steps if self.cost.expected_steps is None else None
        return self.cost.speedup(schedule, steps or usual, over=over)


@dataclass(frozen=True)
class Budget:
    """The target that every schedule of a search has to reach.

    Attributes:
        cost: of decode steps.
        speedup: the target, above 1.
        steps: generated tokens over which the speed of every schedule is predicted.
        prompt, prompt_stop: what prompts run.
    """

    cost: Cost
    speedup: float
    steps: int
    prompt: PromptPolicy | int = "full"
    prompt_stop: int | None = None

    @property
    def over_steps(self) -> OverSteps:
        """The cost over the budget's own steps."""
        return OverSteps(self.cost, self.steps)

    def predicted(self, schedule: SkipSchedule) -> float:
        """The predicted speedup of a schedule."""
        return self.over_steps.speedup(schedule)


@dataclass(frozen=True)
class Space:
    """The space that a search looks in.

    The budgets (max and min) aren't here: the target decides them, with a spread from 0 to 1.

    Raises ConfigError where one of them is empty, or names a number below 1.
    """

    warmups: tuple[int, ...]
    decays: tuple[Decay, ...]
    horizons: tuple[int, ...]
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        for name, values in (("warmup", self.warmups), ("horizons", self.horizons)):
            if not values or min(values) < 1 or len(set(values)) != len(values):
                raise ConfigError(f"--{name} is {list(values)}: name different numbers of at least 1")
            if max(values) > MAX_HORIZON:
                raise ConfigError(f"--{name} is {list(values)}: name numbers of at most {MAX_HORIZON}")
        for name, names in (("decays", self.decays), ("placements", self.placements)):
            if not names or len(set(names)) != len(names):
                raise ConfigError(f"--{name} is {list(names)}: name at least one, each once")


def choose_schedules(
    budget: Budget, space: Space, default: SkipSchedule, *, trials: int, tokens: int, seed: int = 0
) -> list[SkipSchedule]:
    """At most `trials` schedules that reach a budget, the default first, spread evenly over a space.

    Points of a scrambled Sobol sequence choose warm-up, decay, rate, horizon, placement and spread; `solve_schedule`
    finds the budgets. A point whose schedule can't reach the target, or is predicted more than ROOM faster than it (or
    than the default, where that is), or runs the same layers for each of the first `tokens` tokens as one that is
    chosen, is passed over.

    Raises:
        ConfigError: where no schedule beside the default is left.
    """
    cost, ceiling = budget.over_steps, max(budget.speedup * (1 + ROOM), budget.predicted(default))
    chosen = {behaviour(default, tokens): default}
    reasons: dict[str, None] = {}  # an ordered set
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
            reasons[f"the nearest to the target are predicted more than {ROOM:.0%} faster than it"] = None
            continue
        chosen.setdefault(behaviour(schedule, tokens), schedule)
    if len(chosen) == 1:
        why = next(iter(reasons), "all that were drawn skip the same layers as the default")
        raise ConfigError(f"no schedule beside the default reaches the target in this space: {why}")
    return list(chosen.values())


def behaviour(schedule: SkipSchedule, tokens: int) -> Hashable:
    """The layers that the prompt and the first `tokens` generated tokens run: equal for two that do the same."""
    prompt = schedule.prompt_layers, schedule.prompt_depth
    return schedule.num_layers, *prompt, tuple(schedule.layers_at(i) for i in range(tokens))


def spread_of(schedule: SkipSchedule) -> float:
    """The distance of max and min, as in `solve_schedule`: (max - min) / (max + min)."""
    return (schedule.max_layers - schedule.min_layers) / (schedule.max_layers + schedule.min_layers)


def _pick(choices: tuple[Choice, ...], share: float) -> Choice:
    return choices[min(int(share * len(choices)), len(choices) - 1)]
