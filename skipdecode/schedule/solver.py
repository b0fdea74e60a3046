"""Find the schedule for a target speedup: `solve_schedule`."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from skipdecode.schedule.schedule import MAX_HORIZON, Decay, Over, Placement, PromptPolicy, SkipSchedule

# Schedules whose predicted speedup exceeds the smallest sufficient one by at most this fraction count as equally fast;
# `spread` chooses among them.
TOLERANCE = 0.03
# For an end-to-end target, the prompt keeps its layers until decoding alone would have to be this many times as fast as
# the target; beyond it, the prompt runs fewer layers. Tokens that run one or two layers may cost more quality than a
# prompt of fewer layers does (docs/research/benchmarks.md, prompts of fewer layers).
MAX_DECODE_RATIO = 1.5
# Where sequence lengths are known, the horizon may grow up to this multiple of the given one, to use the time that is
# left because the number of layers is an integer.
MAX_HORIZON_RATIO = 4


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
    budgets: Collection[int] | None = None,
    over: Over = "decode",
    lengths: Lengths | Iterable[int] | None = None,
    prompt_lengths: Lengths | Iterable[int] | None = None,
    prompt_length: int | None = None,
    batch_size: int | None = None,
    dtype: torch.dtype | None = None,
    machine: Machine | str | None = None,
) -> SkipSchedule:
    """Find the schedule under which a batch is predicted to run `speedup` times as fast as at full depth.

    The prediction is of wall-clock time and counts the bytes and operations of layers, LM head, embeddings and cache
    (`skipdecode.schedule.cost`), so a target of 3 leaves less than a third of the layers. The schedule is never
    predicted to be slower than the target. Since the number of layers is an integer, a model of few layers may be
    predicted well above it; where `lengths` are known, the horizon is then lengthened as far as the target allows.

    Args:
        model: a causal language model, its config, or its CostModel; or a Cost, such as the one `measure_cost` timed,
            to meet the target on this machine.
        speedup: the target, at least 1. 1 is full depth.
        horizon: number of generated tokens over which the budget decreases. Without `lengths`, every sequence is
            assumed to be this long; with `lengths`, it is the minimum horizon.
        warmup_layers: as in SkipSchedule.
        decay: as in SkipSchedule.
        placement: as in SkipSchedule.
        prompt: as in SkipSchedule. A number below max_layers is raised to it; with over="all", a number is the maximum
            that prompts run.
        decay_rate: as in SkipSchedule.
        prompt_stop: as in SkipSchedule; ignored for full depth.
        order: as in SkipSchedule.
        spread: the distance of max_layers and min_layers, (max - min) / (max + min): 0 is a constant budget, 0.5 a
            max of three times the min. It is kept as nearly as the target allows, and ignored for constant decay, where
            the two are equal.
        budgets: the numbers of layers that tokens and prompts may run, such as those that a checkpoint was trained for;
            None: any from warmup_layers on. Full depth is always allowed.
        over: "decode": the target is for the time from the first new token to the last; "all": for the time of prefill
            and decoding. In the second case prompts run fewer layers where decoding alone would have to be
            `MAX_DECODE_RATIO` times as fast as the target.
        lengths: lengths of the generated sequences in tokens, as numbers or as a distribution. A batch takes the steps
            of its longest sequence; finished sequences leave the batch.
        prompt_lengths: lengths of the prompts in tokens, likewise.
        prompt_length: number of positions in the KV cache when decoding starts, as in `CostModel.at`.
        batch_size: number of sequences that decode together.
        dtype: data type of weights and cache; default: the model's own.
        machine: the rates of the machine, or a name in `skipdecode.schedule.cost.MACHINES`.

    Returns:
        The schedule.

    Raises:
        ConfigError: for a target below 1, or above what a constant schedule of the lowest budget reaches (the message
            names that maximum); for a condition or a dtype given together with a cost that already has it.
    """
    check_speedup(speedup)
    if not isinstance(spread, Real) or not 0 <= spread <= 1:
        raise ConfigError(f"spread is {spread!r}: it must lie between 0 (constant budget) and 1")
    conditions = {"prompt_length": prompt_length, "batch_size": batch_size, "machine": machine}
    cost = _cost(model, dtype, lengths=lengths, prompt_lengths=prompt_lengths, **conditions)
    check_counts(warmup_layers=warmup_layers)
    if warmup_layers > cost.num_layers:
        raise ConfigError(f"warmup_layers is {warmup_layers}: it must lie between 1 and num_layers ({cost.num_layers})")
    shape = {"warmup_layers": warmup_layers, "horizon": horizon, "decay": decay, "placement": placement}
    if order is not None:
        shape["order"] = tuple(order)
    stop = None if speedup == 1 else prompt_stop
    depths = range(warmup_layers, cost.num_layers + 1)
    allowed = [depth for depth in depths if budgets is None or depth in budgets or depth == cost.num_layers]
    target = _Target(cost, speedup, over, spread, allowed, {**shape, "decay_rate": decay_rate, "prompt_stop": stop})
    fastest = target.schedule(allowed[0], allowed[0], prompt if over == "decode" else "max")
    if speedup == 1:
        return target.schedule(cost.num_layers, cost.num_layers, prompt)
    reachable = target.reached_by(fastest)
    if speedup > reachable:
        raise OutOfReachError(speedup, reachable, allowed[0], warmup_layers)
    target = replace(target, speedup=min(speedup * cost.margin, reachable))
    found = target.nearest(prompt)
    if over == "all" and not target.decodes_slowly_enough(found):
        found = target.with_fewer_prompt_layers(target.schedule(allowed[0], allowed[0], prompt).prompt_budget)
    assert found is not None  # since the target can be reached
    return target.with_longer_horizon(found)


class OutOfReachError(ConfigError):
    """The target is above what any schedule reaches.

    Attributes:
        limit: the largest speedup that a schedule reaches, rounded down to two decimals.
    """

    def __init__(self, speedup: float, reachable: float, least: int, warmup_layers: int) -> None:
        self.limit = rounded_down(reachable)
        bound, remedy = f"warmup_layers = min_layers = {least}", "choose a lower speedup, or lower warmup_layers"
        if least > warmup_layers:
            bound, remedy = f"min_layers = {least}, the fewest that budgets allow,", "choose a lower speedup"
        super().__init__(f"speedup is {speedup:g}: with {bound} this model reaches at most {self.limit:.2f}; {remedy}")


@dataclass(frozen=True)
class _Target:
    """A target, and a search among the schedules of one shape that reach it; fields as in `solve_schedule`."""

    cost: Cost
    speedup: float
    over: Over
    spread: float
    budgets: Sequence[int]  # the numbers of layers that may run, ascending
    shape: Mapping[str, Any]  # the fields of the schedules other than max_layers, min_layers and prompt

    def schedule(self, max_layers: int, min_layers: int, prompt: PromptPolicy | int) -> SkipSchedule:
        if not isinstance(prompt, str):
            check_counts(prompt=prompt)
            prompt = "max" if prompt <= max_layers else int(prompt)
        return SkipSchedule(self.cost.num_layers, max_layers, min_layers, prompt=prompt, **self.shape)

    def reached_by(self, schedule: SkipSchedule) -> float:
        """The predicted speedup of a schedule, of the time that `over` names."""
        return self.cost.speedup(schedule, over=self.over)

    def nearest(self, prompt: PromptPolicy | int) -> SkipSchedule | None:
        """The schedule nearest above the target; None where no schedule with this `prompt` reaches it."""
        candidates = self._fast_enough(prompt)
        limit = min(candidates.values(), default=0) * (1 + TOLERANCE)
        near = [candidate for candidate, value in candidates.items() if value <= limit]
        distance = {s: abs((s.max_layers - s.min_layers) / (s.max_layers + s.min_layers) - self.spread) for s in near}
        return min(near, key=lambda s: (distance[s], candidates[s]), default=None)

    def _fast_enough(self, prompt: PromptPolicy | int) -> dict[SkipSchedule, float]:
        """For each max_layers that allows it, the slowest schedule that reaches the target, and its speedup."""
        candidates: dict[SkipSchedule, float] = {}
        lowest = 0  # position in `budgets` of the least min_layers
        for position, max_layers in enumerate(self.budgets):
            if self.shape["decay"] == "constant" or max_layers - 1 != self.budgets[position - 1]:
                lowest = position  # a budget that decays passes through every number down to min_layers
            if self.reached_by(self.schedule(max_layers, self.budgets[lowest], prompt)) < self.speedup:
                break  # a larger max_layers is even slower
            low, high = lowest, position  # binary search for the largest min_layers that is fast enough
            while low < high:
                middle = (low + high + 1) // 2
                fast = self.reached_by(self.schedule(max_layers, self.budgets[middle], prompt)) >= self.speedup
                low, high = (middle, high) if fast else (low, middle - 1)
            candidate = self.schedule(max_layers, self.budgets[low], prompt)
            candidates[candidate] = self.reached_by(candidate)
        return candidates

    def decodes_slowly_enough(self, schedule: SkipSchedule | None) -> bool:
        """Whether there is a schedule, and decoding alone is at most `MAX_DECODE_RATIO` times as fast as the target."""
        if schedule is None:
            return False
        full = self.cost.decode_seconds(SkipSchedule.full_depth(self.cost.num_layers, schedule.horizon))
        return full <= MAX_DECODE_RATIO * self.speedup * self.cost.decode_seconds(schedule)

    def with_fewer_prompt_layers(self, above: int) -> SkipSchedule | None:
        """The schedule whose prompts run the largest number of layers, below `above`, that `decodes_slowly_enough`.

        Where there is none, prompts run max_layers.
        """
        found = self.nearest("max")
        numbers = [budget for budget in self.budgets[1:] if budget < above]
        while numbers:
            middle = len(numbers) // 2
            candidate = self.nearest(numbers[middle])
            if self.decodes_slowly_enough(candidate):
                numbers, found = numbers[middle + 1 :], candidate
            else:
                numbers = numbers[:middle]
        return found

    def with_longer_horizon(self, schedule: SkipSchedule) -> SkipSchedule:
        """Where sequence lengths are known, lengthen the horizon as far as the target allows."""
        if self.cost.expected_steps is None or schedule.max_layers == schedule.min_layers:
            return schedule
        low, high = schedule.horizon, min(MAX_HORIZON_RATIO * schedule.horizon, MAX_HORIZON)
        while low < high:
            middle = (low + high + 1) // 2
            fast = self.reached_by(replace(schedule, horizon=middle)) >= self.speedup
            low, high = (middle, high) if fast else (low, middle - 1)
        return replace(schedule, horizon=low)


def check_speedup(speedup: float) -> None:
    """Raise ConfigError unless `speedup` is a finite number of at least 1."""
    if isinstance(speedup, bool) or not isinstance(speedup, Real) or not math.isfinite(speedup) or speedup < 1:
        raise ConfigError(f"speedup is {speedup!r}: it must be a number of at least 1")


def _cost(model: nn.Module | PretrainedConfig | CostModel | Cost, dtype: torch.dtype | None, **conditions: Any) -> Cost:
    """The cost of a model under the conditions that aren't None."""
    if isinstance(model, Cost):
        _refuse_given(model, dtype=dtype, **conditions)
        return model
    if isinstance(model, CostModel):
        _refuse_given(model, dtype=dtype)
    else:
        model = CostModel.of(model, dtype)
    return model.at(**{name: value for name, value in conditions.items() if value is not None})


def _refuse_given(cost: CostModel | Cost, **settings: Any) -> None:
    for name, value in settings.items():
        if value is not None:
            raise ConfigError(f"{name} is {value!r}, but the given {type(cost).__name__} has its own: leave it out")
