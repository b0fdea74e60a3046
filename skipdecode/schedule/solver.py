"""From a target speedup to a schedule: `solve_schedule`."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from skipdecode.errors import ConfigError, check_counts
from skipdecode.schedule.cost import Cost, CostModel, Machine
from skipdecode.schedule.lengths import Lengths
from skipdecode.schedule.plan import rounded_down
from skipdecode.schedule.schedule import LONGEST_HORIZON, Decay, Over, Placement, PromptPolicy, SkipSchedule

# Among schedules whose predicted speedup is this close to the one nearest above the target, the spread decides.
TOLERANCE = 0.03
# Over prompt and decoding together, prompts keep their layers until decoding would have to be so many times as fast as
# the target: a text whose tokens run a layer or two may read worse than one after a prompt of fewer layers, which
# nothing here decides (docs/research/benchmarks.md, prompts of fewer layers).
MOST_DECODING = 1.5
# Times the horizon that was asked for: whole texts may have one so long, to use up what integers of layers leave.
LONGEST_STRETCH = 4


def solve_schedule(
    model: nn.Module | PretrainedConfig | CostModel | Cost,
    speedup: float,
    *,
    horizon: int = 64,
    warmup_layers: int = 1,
    decay: Decay = "linear",
    placement: Placement = "top",
    prompt: PromptPolicy | int = "full",
    decay_rate: float | None = None,
    prompt_stop: int | None = None,
    order: Iterable[int] | None = None,
    spread: float = 0.5,
    over: Over = "decode",
    lengths: Lengths | Iterable[int] | None = None,
    prompt_lengths: Lengths | Iterable[int] | None = None,
    prompt_length: int | None = None,
    batch_size: int | None = None,
    dtype: torch.dtype | None = None,
    machine: Machine | str | None = None,
) -> SkipSchedule:
    """The schedule under which a batch is predicted to take `speedup` times less of the wall clock than at full depth.

    The prediction counts the bytes and operations of layers, LM head, embeddings and cache
    (`skipdecode.schedule.cost`), so a target of 3 leaves less than a third of the layers. The schedule is never
    predicted slower than the target; it is the nearest that integers of layers allow, which on a model of few layers
    can be well above it; of texts whose lengths are known, the budget then falls more slowly, as far as the target
    allows.

    Args:
        model: a causal language model, its config, or its CostModel; or a cost, such as `measure_cost` timed, so that
            the target is met on this machine's clock.
        speedup: the target, at least 1. 1 is full depth.
        horizon: generated tokens over which the budget falls; without `lengths`, all texts are taken to be as long, and
            with them it is the least.
        warmup_layers: as in SkipSchedule.
        decay: as in SkipSchedule.
        placement: as in SkipSchedule.
        prompt: as in SkipSchedule; a number is raised to max_layers where that is more, and over "all" it is the most
            that prompts run.
        decay_rate: as in SkipSchedule.
        prompt_stop: as in SkipSchedule; full depth has none.
        order: as in SkipSchedule.
        spread: how far max_layers and min_layers lie apart, (max - min) / (max + min): 0 is a constant budget, 0.5 a
            max of three times the min. It is kept as nearly as the target allows. A constant decay has none: what
            doesn't fall within the horizon must not fall at its end.
        over: "decode", the time from the first new token to the last; "all", that of the prompt too. Then prompts run
            fewer layers where decoding alone would have to be `MOST_DECODING` times as fast as the target.
        lengths: tokens of the texts that are generated: numbers, or a distribution. A batch takes the steps of its
            longest text, and rows that have ended leave.
        prompt_lengths: tokens of prompts, likewise.
        prompt_length: columns in the cache when decoding starts, as in `CostModel.at`.
        batch_size: rows that decode together.
        dtype: of weights and cache; by default the model's own.
        machine: what the machine sustains, or a name in `skipdecode.schedule.cost.MACHINES`.

    Raises:
        ConfigError: for a target below 1, or beyond what min = max = warmup_layers reaches; it says how much that is;
            for a condition, or a dtype, beside a cost that has its own.
    """
    check_speedup(speedup)
    if not isinstance(spread, Real) or not 0 <= spread <= 1:
        raise ConfigError(f"spread is {spread!r}: it must lie between 0 (a constant budget) and 1")
    conditions = {"prompt_length": prompt_length, "batch_size": batch_size, "machine": machine}
    cost = _cost(model, dtype, lengths=lengths, prompt_lengths=prompt_lengths, **conditions)
    check_counts(warmup_layers=warmup_layers)
    if warmup_layers > cost.num_layers:
        raise ConfigError(f"warmup_layers is {warmup_layers}: it must lie between 1 and num_layers ({cost.num_layers})")
    shape = {"warmup_layers": warmup_layers, "horizon": horizon, "decay": decay, "placement": placement}
    if order is not None:
        shape["order"] = tuple(order)
    stop = None if speedup == 1 else prompt_stop
    target = _Target(cost, speedup, over, spread, {**shape, "decay_rate": decay_rate, "prompt_stop": stop})
    least = target.schedule(warmup_layers, warmup_layers, prompt if over == "decode" else "max")
    if speedup == 1:
        return target.schedule(cost.num_layers, cost.num_layers, prompt)
    reachable = target.reached_by(least)
    if speedup > reachable:
        raise OutOfReachError(speedup, reachable, warmup_layers)
    target = replace(target, speedup=min(speedup * cost.margin, reachable))
    most = target.schedule(warmup_layers, warmup_layers, prompt).prompt_budget
    found = target.nearest(prompt)
    if over == "all" and not target.is_bearable(found):
        found = target.with_fewer_prompt_layers(most)
    assert found is not None  # as the target can be reached
    return target.with_longer_horizon(found)


class OutOfReachError(ConfigError):
    """A target that no schedule reaches; `most` is the largest that one does, to two decimals."""

    def __init__(self, speedup: float, reachable: float, warmup_layers: int) -> None:
        self.most = rounded_down(reachable)
        super().__init__(
            f"speedup is {speedup:g}: with warmup_layers = min_layers = {warmup_layers} this model reaches at most "
            f"{self.most:.2f}; ask for less, or lower warmup_layers"
        )


@dataclass(frozen=True)
class _Target:
    """A target, and the schedules of one shape that reach it; the arguments are those of `solve_schedule`."""

    cost: Cost
    speedup: float
    over: Over
    spread: float
    shape: Mapping[str, Any]  # fields of the schedules, but for their budgets

    def schedule(self, most: int, least: int, prompt: PromptPolicy | int) -> SkipSchedule:
        """The schedule of a max and a min, whose prompts run so many layers at most."""
        if not isinstance(prompt, str):
            check_counts(prompt=prompt)
            prompt = "max" if prompt <= most else int(prompt)
        return SkipSchedule(self.cost.num_layers, most, least, prompt=prompt, **self.shape)

    def reached_by(self, schedule: SkipSchedule) -> float:
        """The speedup of a schedule, of the kind that is asked for."""
        return self.cost.speedup(schedule, over=self.over)

    def nearest(self, prompt: PromptPolicy | int) -> SkipSchedule | None:
        """The schedule nearest above the target; None where prompts of so many layers leave none."""
        candidates = self._fast_enough(prompt)
        limit = min(candidates.values(), default=0) * (1 + TOLERANCE)
        near = [candidate for candidate, value in candidates.items() if value <= limit]
        away = {s: abs((s.max_layers - s.min_layers) / (s.max_layers + s.min_layers) - self.spread) for s in near}
        return min(near, key=lambda s: (away[s], candidates[s]), default=None)

    def _fast_enough(self, prompt: PromptPolicy | int) -> dict[SkipSchedule, float]:
        """For each max that allows it, the slowest schedule that reaches the target, and what it reaches."""
        candidates: dict[SkipSchedule, float] = {}
        warmup = self.shape["warmup_layers"]
        for most in range(warmup, self.cost.num_layers + 1):
            lowest = most if self.shape["decay"] == "constant" else warmup
            if self.reached_by(self.schedule(most, lowest, prompt)) < self.speedup:
                break  # a higher max is slower still
            low, high = lowest, most  # the largest min that is fast enough lies in between
            while low < high:
                middle = (low + high + 1) // 2
                fast = self.reached_by(self.schedule(most, middle, prompt)) >= self.speedup
                low, high = (middle, high) if fast else (low, middle - 1)
            candidate = self.schedule(most, low, prompt)
            candidates[candidate] = self.reached_by(candidate)
        return candidates

    def is_bearable(self, schedule: SkipSchedule | None) -> bool:
        """False where decoding alone is `MOST_DECODING` times as fast as the target, or nothing is fast enough."""
        if schedule is None:
            return False
        full = self.cost.decode_seconds(SkipSchedule.full_depth(self.cost.num_layers, schedule.horizon))
        return full <= MOST_DECODING * self.speedup * self.cost.decode_seconds(schedule)

    def with_fewer_prompt_layers(self, most: int) -> SkipSchedule | None:
        """The schedule with the most layers of prompts, below `most`, that is bearable; without any, the fewest."""
        found, fewest = self.nearest("max"), self.shape["warmup_layers"]
        while most - fewest > 1:
            middle = (fewest + most) // 2
            candidate = self.nearest(middle)
            fewest, most, found = (middle, most, candidate) if self.is_bearable(candidate) else (fewest, middle, found)
        return found

    def with_longer_horizon(self, schedule: SkipSchedule) -> SkipSchedule:
        """The schedule with the longest horizon with which it still reaches the target, where texts have a length."""
        if self.cost.expected_steps is None or schedule.max_layers == schedule.min_layers:
            return schedule
        low, high = schedule.horizon, min(LONGEST_STRETCH * schedule.horizon, LONGEST_HORIZON)
        while low < high:
            middle = (low + high + 1) // 2
            fast = self.reached_by(replace(schedule, horizon=middle)) >= self.speedup
            low, high = (middle, high) if fast else (low, middle - 1)
        return replace(schedule, horizon=low)


def check_speedup(speedup: float) -> None:
    """Raises ConfigError where a target is no number of at least 1."""
    if isinstance(speedup, bool) or not isinstance(speedup, Real) or not math.isfinite(speedup) or speedup < 1:
        raise ConfigError(f"speedup is {speedup!r}: it must be a number of at least 1")


def _cost(model: nn.Module | PretrainedConfig | CostModel | Cost, dtype: torch.dtype | None, **conditions: Any) -> Cost:
    """The cost of a model under those of the conditions that aren't None."""
    if isinstance(model, Cost):
        _refuse_beside(model, dtype=dtype, **conditions)
        return model
    if isinstance(model, CostModel):
        _refuse_beside(model, dtype=dtype)
    else:
        model = CostModel.of(model, dtype)
    return model.at(**{name: value for name, value in conditions.items() if value is not None})


def _refuse_beside(cost: CostModel | Cost, **settings: Any) -> None:
    for name, value in settings.items():
        if value is not None:
            raise ConfigError(f"{name} is {value!r} beside a {type(cost).__name__}, which has its own: leave it out")
