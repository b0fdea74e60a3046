"""Calibration: time a model's passes on this machine, so that schedules reach their target speedups here."""

import datetime
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import GenerationConfig

from skipdecode.errors import ConfigError, check_counts
from skipdecode.families import decoder_layers, longest_sequence, text_config, unwrap
from skipdecode.generate.fast_path import fast_path
from skipdecode.generate.skip_generate import skip_generate
from skipdecode.generate.stopping import RowLengths
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.cost import CostModel, MeasuredCost
from skipdecode.schedule.machine_profile import Profile, TimedBatch, profile_setting
from skipdecode.schedule.schedule import PromptPolicy, SkipSchedule
from skipdecode.timing.interleave import Ratio, order_of_turn
from skipdecode.timing.step_clock import generate_timed

# Depths that are timed, as fractions of all layers, in addition to one layer. They are closer together for few layers,
# which may stay in the processor's caches and then cost less each.
DEPTHS = (1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1)
STEPS = 16  # that a long sequence has more than a short one
SHORT = 4  # steps of a short sequence, whose time is mostly startup
_STARTUP_RATIO = 2  # the startup time is measured again for prompts this many times as long, as they fill the caches
DISAGREEING = 0.15  # spread of the rounds above which other work must have run on the machine
_MAX_NEW = 128  # new tokens that caches are allocated for: one for few tokens would be quicker to fill than users' are


def measure_cost(
    model: nn.Module,
    *,
    batch_size: int = 1,
    prompt_length: int = 64,
    weights: Weights | None = None,
    repeats: int = 8,
    steps: int = STEPS,
) -> MeasuredCost:
    """Time the prefill and decode steps at several depths, by `skip_generate` with everything around the passes.

    Each repeat decodes two batches at each depth, one with few steps and one with `steps` more, which separates the
    startup time of decoding from the time of each step. Depths are compared within a repeat (`relative_times`).

    Args:
        model: a causal language model, on the device and in the dtype that it will decode in.
        batch_size: sequences that decode together.
        prompt_length: KV slots in use when decoding starts; fewer if the model hasn't enough positions.
        weights: as in `skip_generate`.
        repeats: number of repeats, after a warm-up.
        steps: additional steps of the longer sequences; fewer if the model hasn't enough positions.

    Raises:
        ConfigError: for an unknown family, a model of one layer or of very few positions, and counts below 1.
    """
    check_counts(prompt_length=prompt_length, steps=steps)
    steps, max_prompt = room_for(model, steps)
    (timed,) = _measure(model, [(batch_size, min(prompt_length, max_prompt))], weights, repeats, steps)
    return _cost(batch_size, timed, len(decoder_layers(model)))


def room_for(model: nn.Module, steps: int = STEPS) -> tuple[int, int]:
    """How many steps can be timed, `steps` at most, and the maximum prompt length for them. Raises ConfigError if the
    model hasn't enough positions for a single step.
    """
    config: Any = unwrap(model).config
    positions = longest_sequence(config)
    if positions is None:
        return steps, sys.maxsize
    if positions < SHORT + 2:
        raise ConfigError(f"the model has {positions} positions: timing its steps needs at least {SHORT + 2}")
    steps = min(steps, positions - SHORT - 1)
    return steps, positions - SHORT - steps


def _measure(
    model: nn.Module,
    batches: Sequence[tuple[int, int]],
    weights: Weights | None,
    repeats: int,
    steps: int,
    advance: Callable[[], None] = lambda: None,
) -> "list[list[_Repeat]]":
    """Time batches, given by size and prompt length, which take turns in each repeat."""
    for batch_size, _ in batches:
        check_counts(batch_size=batch_size, repeats=repeats)
    num_layers = len(decoder_layers(model))
    if num_layers < 2:
        raise ConfigError(f"the model has {num_layers} layer: there are no depths to compare")
    depths = sorted({1, *(max(1, round(share * num_layers)) for share in DEPTHS)})
    inner: Any = unwrap(model)
    timed: dict[tuple[int, int], list[_Repeat]] = {batch: [] for batch in batches}
    training, own = inner.training, inner.generation_config
    inner.eval()
    inner.generation_config = GenerationConfig()  # the model's own may stop early, penalise tokens or use another cache
    try:
        for repeat in range(repeats + 1):
            # Batch size -> prompt length, startup seconds by layers, and `cold` of a MeasuredCost.
            starts: dict[int, tuple[int, dict[int, float], float]] = {}
            for batch_size, prompt_length in sorted(timed):
                batch = (batch_size, prompt_length)
                # The first call pays for what other batches left in caches. So one call isn't timed, and another depth
                # comes first in each repeat.
                order = order_of_turn(depths, repeat)
                _time_call(inner, order[-1], *batch, weights, SHORT)
                long = {n: _time_call(inner, n, *batch, weights, SHORT + steps) for n in order}
                stopped = _time_call(inner, depths[-1], *batch, weights, SHORT, stop=1)[0]
                if batch_size not in starts or prompt_length >= _STARTUP_RATIO * starts[batch_size][0]:
                    starts[batch_size] = prompt_length, *_time_starts(inner, *batch, weights, long, steps)
                _, start, cold = starts[batch_size]
                times = {
                    depth: _Times(prefill, (seconds - min(start[depth], seconds / 2)) / (SHORT + steps), start[depth])
                    for depth, (prefill, seconds) in long.items()
                }
                if repeat:  # the first warms up
                    timed[batch].append(_Repeat(times, stopped, cold))
            advance()
    finally:
        inner.train(training)
        inner.generation_config = own
    return [timed[batch] for batch in batches]


class _Times(NamedTuple):
    """Seconds of a batch: of its prefill, of a step, and of the startup of decoding."""

    prefill: float
    step: float
    start: float


class _Repeat(NamedTuple):
    """Times of a batch by layers, seconds of a prefill that stops after one layer, and `cold` of a MeasuredCost."""

    times: Mapping[int, _Times]
    stopped: float
    cold: float

    @property
    def stopped_share(self) -> float:
        """The share of a layer's prefill time that remains if the prompt has stopped below it."""
        one, full = self.times[1], self.times[max(self.times)]
        last_token = full.step - one.step  # the last token of each prompt runs all layers
        return (self.stopped - one.prefill - last_token) / max(full.prefill - one.prefill, 1e-9)


def _time_starts(
    inner: Any,
    batch_size: int,
    prompt_length: int,
    weights: Weights | None,
    long: Mapping[int, tuple[float, float]],
    steps: int,
) -> tuple[dict[int, float], float]:
    """The startup seconds of decoding by layers, given the times of longer sequences; and `cold` of a MeasuredCost.

    If a prompt has run other layers than the first step, these are in the processor's caches in place of the step's.
    """
    short = {n: _time_call(inner, n, batch_size, prompt_length, weights, SHORT)[1] for n in long}
    full_prompt = _time_call(inner, 1, batch_size, prompt_length, weights, SHORT, prompt="full")[1]
    cold = max(0.0, full_prompt - short[1])
    warm = {n: max(0.0, short[n] - SHORT * (seconds - short[n]) / steps) for n, (_, seconds) in long.items()}
    return warm, cold


def _time_call(
    inner: Any,
    depth: int,
    batch_size: int,
    prompt_length: int,
    weights: Weights | None,
    steps: int,
    prompt: PromptPolicy = "max",
    stop: int | None = None,
) -> tuple[float, float]:
    """The seconds of the prefill and of `steps` decode steps, at one depth; prompts may stop after `stop` layers."""
    vocabulary: int = text_config(inner.config).vocab_size
    positions, max_new = longest_sequence(inner.config), _MAX_NEW
    if positions is not None:
        max_new = min(max_new, positions - prompt_length)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (batch_size, prompt_length), generator=generator).to(inner.device)
    ends = RowLengths([steps + 1] * batch_size, prompt_length, vocabulary, inner.device)
    clock = generate_timed(
        inner,
        ids,
        stopping_criteria=[ends],
        custom_generate=skip_generate,
        schedule=SkipSchedule(len(decoder_layers(inner)), depth, depth, prompt=prompt, prompt_stop=stop),
        weights=weights,
        max_new_tokens=max(steps + 1, max_new),
        eos_token_id=None,
        pad_token_id=0,
    ).clock
    return clock.prefill_seconds, clock.decode_seconds


def _cost(batch_size: int, timed: Sequence[_Repeat], num_layers: int) -> MeasuredCost:
    """The cost of a batch, given its times by depth in each repeat."""

    def medians(name: str, unit: str) -> dict[int, float]:
        repeats = [{depth: getattr(times, name) for depth, times in repeat.times.items()} for repeat in timed]
        units = [getattr(repeat.times[num_layers], unit) for repeat in timed]
        unit_seconds = statistics.median(units)
        return {depth: unit_seconds * share for depth, share in relative_times(repeats, units).items()}

    prefill, step, start = medians("prefill", "prefill"), medians("step", "step"), medians("start", "step")
    share = min(max(0.0, statistics.median(repeat.stopped_share for repeat in timed)), 1.0)
    cold = step[num_layers] * statistics.median(repeat.cold / repeat.times[num_layers].step for repeat in timed)
    return MeasuredCost(num_layers, step, batch_size, prefill=prefill, start=start, stopped_share=share, cold=cold)


@dataclass(frozen=True)
class Spread:
    """How much the rounds of a measurement differ for one batch.

    Attributes:
        batch_size, prompt_length: of the batch.
        share: interquartile range divided by the median: of the seconds of a step at full depth, of a step of one
            layer, or of their ratio, whichever is largest. 0 for a single round.
    """

    batch_size: int
    prompt_length: int
    share: float


@dataclass(frozen=True)
class Calibration:
    """A measured profile, and how well its rounds agree."""

    profile: Profile
    spreads: tuple[Spread, ...]

    def warning(self) -> str | None:
        """A warning that the rounds disagree; None if they agree."""
        worst = max(self.spreads, key=lambda spread: spread.share)
        if worst.share <= DISAGREEING:
            return None
        return (
            f"the rounds disagree by up to {worst.share:.0%} (batch size {worst.batch_size}, prompt length "
            f"{worst.prompt_length}): other work ran at the same time or the processor changed its speed, so schedules "
            "solved with this profile may miss their target speedups; measure again while nothing else runs"
        )


def _spread(timed: Sequence[_Repeat], num_layers: int) -> float:
    """The `Spread.share` of a batch's rounds."""
    full, one = ([repeat.times[depth].step for repeat in timed] for depth in (num_layers, 1))
    ones = [1.0] * len(timed)
    ratios = (Ratio.of(full, ones), Ratio.of(one, ones), Ratio.of(full, one))
    return max((ratio.upper - ratio.lower) / ratio.median for ratio in ratios)


def measure_profile(
    model: nn.Module,
    *,
    batch_sizes: Sequence[int],
    prompt_lengths: Sequence[int],
    weights: Weights | None = None,
    repeats: int = 8,
    advance: Callable[[], None] = lambda: None,
) -> Calibration:
    """Time batches of every size with prompts of every length, as `measure_cost` does; `Profile.save` stores it.

    Batches take turns in each repeat, so that they are comparable even if the machine's speed drifts.

    Args:
        model: as in `measure_cost`.
        batch_sizes: numbers of sequences that decode together.
        prompt_lengths: KV slots in use when decoding starts; fewer if the model hasn't enough positions.
        weights: as in `measure_cost`.
        repeats: as in `measure_cost`.
        advance: called after each repeat and after the warm-up.

    Raises:
        ConfigError: as `measure_cost` does.
    """
    inner: Any = unwrap(model)
    weights = weights or fast_path(inner).usual_weights()
    for length in prompt_lengths:
        check_counts(prompt_length=length)
    steps, max_prompt = room_for(inner)
    lengths = dict.fromkeys(min(length, max_prompt) for length in prompt_lengths)
    sized = [(batch_size, length) for length in lengths for batch_size in dict.fromkeys(batch_sizes)]
    num_layers = len(decoder_layers(inner))
    timed = _measure(model, sized, weights, repeats, steps, advance)
    costs = [_cost(batch_size, each, num_layers) for (batch_size, _), each in zip(sized, timed, strict=True)]
    batches = [
        TimedBatch(
            batch_size,
            length,
            length + (SHORT + steps) // 2,
            cost.seconds_by_layers,
            cost.prefill,
            cost.start,
            cost.stopped_share,
            cost.cold,
        )
        for (batch_size, length), cost in zip(sized, costs, strict=True)
    ]
    sizes = CostModel.of(inner)
    today = datetime.date.today().isoformat()
    profile = Profile(profile_setting(inner, sizes, weights), sizes.num_layers, tuple(batches), today)
    spreads = (Spread(*size, _spread(each, num_layers)) for size, each in zip(sized, timed, strict=True))
    return Calibration(profile, tuple(spreads))


def relative_times(repeats: Sequence[Mapping[int, float]], units: Sequence[float]) -> dict[int, float]:
    """The time of each depth relative to full depth: medians over repeats, made non-decreasing in the number of layers.

    Only times of the same repeat are compared: they were taken within seconds, so that a drift of the machine's speed
    affects both alike. If other work slowed one of them, the ratio is an outlier, which the median ignores.

    Args:
        repeats: for each, layers -> seconds.
        units: for each, the seconds that count as 1.
    """
    depths = sorted(repeats[0])
    shares = [statistics.median(times[n] / unit for times, unit in zip(repeats, units, strict=True)) for n in depths]
    return dict(zip(depths, accumulate(shares, max), strict=True))
