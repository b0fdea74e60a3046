"""Timing a model's decode steps on the machine at hand, for schedules that meet their target there."""

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
from skipdecode.schedule.machine_profile import Profile, TimedBatch, setting_of
from skipdecode.schedule.schedule import PromptPolicy, SkipSchedule
from skipdecode.timing.interleave import Ratio, order_of_turn
from skipdecode.timing.step_clock import generate_timed

# Depths that are timed, as shares of all layers, and one layer: closer together where few layers run, as these stay in
# a processor's caches and cost less each, up to some number of them.
DEPTHS = (1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1)
STEPS = 16  # that are timed, behind those of a short text
SHORT = 4  # steps of a text of which most of the time may be what it takes once
_LONGER = 2  # times as long: behind such prompts decoding takes something else once, as they fill the caches
DISAGREEING = 0.15  # spread of the rounds from which on something else must have had the machine, too
_ROOM = 128  # tokens that a text may have: a cache laid out for few would be quicker to fill than those of users


def measure_cost(
    model: nn.Module,
    *,
    batch_size: int = 1,
    prompt_length: int = 64,
    weights: Weights | None = None,
    repeats: int = 8,
    steps: int = STEPS,
) -> MeasuredCost:
    """Time decode steps of a few depths, and the prompts' pass, through `skip_generate`, with all that lies between.

    Each repeat is two texts at each depth, a short one and one of `steps` more, so that what a text takes once is told
    from what each of its steps takes. Depths are told from one another within a repeat (`relative_times`).

    Args:
        model: a causal language model, on the device and in the type that it will decode in.
        batch_size: rows that decode together.
        prompt_length: columns in the cache when decoding starts; fewer where the model hasn't the positions.
        weights: what decode steps compute with, as in `skip_generate`.
        repeats: of the generations, after one that warms up.
        steps: that are timed, behind those of the short text; fewer likewise.

    Raises:
        ConfigError: for a family that isn't known, a model of one layer or of hardly any positions, and counts below 1.
    """
    check_counts(prompt_length=prompt_length, steps=steps)
    steps, most = room_for(model, steps)
    (timed,) = _measure(model, [(batch_size, min(prompt_length, most))], weights, repeats, steps)
    return _cost(batch_size, timed, len(decoder_layers(model)))


def room_for(model: nn.Module, steps: int = STEPS) -> tuple[int, int]:
    """The steps that can be timed behind those of the short text, `steps` at most, and behind how many columns.

    Raises ConfigError where the model hasn't the positions for a single one.
    """
    config: Any = unwrap(model).config
    positions = longest_sequence(config)
    if positions is None:
        return steps, sys.maxsize
    if positions < SHORT + 2:
        raise ConfigError(f"the model has {positions} positions: to time its steps takes {SHORT + 2} at least")
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
    """The times of batches, of rows and columns of their prompts, which take turns in each repeat."""
    for rows, _ in batches:
        check_counts(batch_size=rows, repeats=repeats)
    num_layers = len(decoder_layers(model))
    if num_layers < 2:
        raise ConfigError(f"the model has {num_layers} layer: there are no depths to time apart")
    depths = sorted({1, *(max(1, round(share * num_layers)) for share in DEPTHS)})
    inner: Any = unwrap(model)
    timed: dict[tuple[int, int], list[_Repeat]] = {batch: [] for batch in batches}
    training, own = inner.training, inner.generation_config
    inner.eval()
    inner.generation_config = GenerationConfig()  # a model's own may stop, punish or cache in its way
    try:
        for repeat in range(repeats + 1):
            # Of as many rows, behind how many columns: by layers, and what is cold.
            starts: dict[int, tuple[int, dict[int, float], float]] = {}
            for rows, columns in sorted(timed):
                # The first texts pay for what other batches left in caches: one isn't timed, and the depth that comes
                # first changes.
                order = order_of_turn(depths, repeat)
                _time_text(inner, order[-1], rows, columns, weights, SHORT)
                long = {n: _time_text(inner, n, rows, columns, weights, SHORT + steps) for n in order}
                stopped = _time_text(inner, depths[-1], rows, columns, weights, SHORT, stop=1)[0]
                if rows not in starts or columns >= _LONGER * starts[rows][0]:
                    starts[rows] = columns, *_time_starts(inner, rows, columns, weights, long, steps)
                _, once, cold = starts[rows]
                times = {
                    depth: _Times(prefill, (seconds - min(once[depth], seconds / 2)) / (SHORT + steps), once[depth])
                    for depth, (prefill, seconds) in long.items()
                }
                if repeat:  # the first warms up
                    timed[rows, columns].append(_Repeat(times, stopped, cold))
            advance()
    finally:
        inner.train(training)
        inner.generation_config = own
    return [timed[batch] for batch in batches]


class _Times(NamedTuple):
    """Seconds of a batch: of its prompts' pass, of a step, and what its texts take once."""

    prefill: float
    step: float
    start: float


class _Repeat(NamedTuple):
    """Seconds of a batch by layers, those of prompts that stop after one layer, and `cold` of a MeasuredCost."""

    times: Mapping[int, _Times]
    stopped: float
    cold: float

    @property
    def stopped_share(self) -> float:
        """Of the time that a layer takes of a prompt, what it takes where the prompt has stopped."""
        least, most = self.times[1], self.times[max(self.times)]
        last = most.step - least.step  # of each prompt's last token, which runs on
        return (self.stopped - least.prefill - last) / max(most.prefill - least.prefill, 1e-9)


def _time_starts(
    inner: Any,
    rows: int,
    columns: int,
    weights: Weights | None,
    long: Mapping[int, tuple[float, float]],
    steps: int,
) -> tuple[dict[int, float], float]:
    """By layers, what decoding takes once behind prompts of as many, of the times of longer texts; and what is cold.

    What a prompt runs of other layers, its text's first step finds in the processor's caches in place of its own.
    """
    short = {n: _time_text(inner, n, rows, columns, weights, SHORT)[1] for n in long}
    cold = max(0.0, _time_text(inner, 1, rows, columns, weights, SHORT, prompt="full")[1] - short[1])
    warm = {n: max(0.0, short[n] - SHORT * (seconds - short[n]) / steps) for n, (_, seconds) in long.items()}
    return warm, cold


def _time_text(
    inner: Any,
    depth: int,
    rows: int,
    columns: int,
    weights: Weights | None,
    steps: int,
    prompt: PromptPolicy = "max",
    stop: int | None = None,
) -> tuple[float, float]:
    """The seconds of the prompts' pass and of so many steps, all through so many layers; prompts may stop."""
    vocabulary: int = text_config(inner.config).vocab_size
    positions, room = longest_sequence(inner.config), _ROOM
    if positions is not None:
        room = min(room, positions - columns)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (rows, columns), generator=generator).to(inner.device)
    ends = RowLengths([steps + 1] * rows, columns, vocabulary, inner.device)
    clock = generate_timed(
        inner,
        ids,
        stopping_criteria=[ends],
        custom_generate=skip_generate,
        schedule=SkipSchedule(len(decoder_layers(inner)), depth, depth, prompt=prompt, prompt_stop=stop),
        weights=weights,
        max_new_tokens=max(steps + 1, room),
        eos_token_id=None,
        pad_token_id=0,
    ).clock
    return clock.prefill_seconds, clock.decode_seconds


def _cost(rows: int, timed: Sequence[_Repeat], num_layers: int) -> MeasuredCost:
    """The cost of a batch, of its times by depth in each repeat."""

    def medians(name: str, unit: str) -> dict[int, float]:
        repeats = [{depth: getattr(times, name) for depth, times in repeat.times.items()} for repeat in timed]
        units = [getattr(repeat.times[num_layers], unit) for repeat in timed]
        whole = statistics.median(units)
        return {depth: whole * share for depth, share in relative_times(repeats, units).items()}

    prefill, step, start = medians("prefill", "prefill"), medians("step", "step"), medians("start", "step")
    share = min(max(0.0, statistics.median(repeat.stopped_share for repeat in timed)), 1.0)
    cold = step[num_layers] * statistics.median(repeat.cold / repeat.times[num_layers].step for repeat in timed)
    return MeasuredCost(num_layers, step, rows, prefill=prefill, start=start, stopped_share=share, cold=cold)


@dataclass(frozen=True)
class Spread:
    """How far the rounds of a measurement lie apart, of one batch.

    Attributes:
        batch_size, prompt_length: of it.
        share: the distance of the quartiles over the median: of the seconds of a step at full depth, of one layer, or
            of how these compare, whichever is largest. 0 of a single round.
    """

    batch_size: int
    prompt_length: int
    share: float


@dataclass(frozen=True)
class Calibration:
    """A profile as it was measured, and how well its rounds agree."""

    profile: Profile
    spreads: tuple[Spread, ...]

    def warning(self) -> str | None:
        """Say that the rounds disagree; None where they agree."""
        worst = max(self.spreads, key=lambda spread: spread.share)
        if worst.share <= DISAGREEING:
            return None
        return (
            f"the rounds disagree by up to {worst.share:.0%} (batch {worst.batch_size} behind {worst.prompt_length} "
            "tokens): other work ran beside the measurement, or the machine changed its pace, so that speeds that are "
            "solved for it may miss their targets; measure again while nothing else runs"
        )


def _spread(timed: Sequence[_Repeat], num_layers: int) -> float:
    """`Spread.share` of a batch's rounds."""
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
    """Time batches of every size behind prompts of every length, as `measure_cost`; `Profile.save` keeps what is found.

    They take turns in each repeat, so that on a machine whose speed drifts they compare.

    Args:
        model: as in `measure_cost`.
        batch_sizes: rows that decode together.
        prompt_lengths: columns in the cache when decoding starts, likewise.
        weights: as in `measure_cost`.
        repeats: as in `measure_cost`.
        advance: called after each repeat, and after the one that warms up.

    Raises:
        ConfigError: as `measure_cost` does.
    """
    inner: Any = unwrap(model)
    weights = weights or fast_path(inner).usual_weights()
    for columns in prompt_lengths:
        check_counts(prompt_length=columns)
    steps, most = room_for(inner)
    lengths = dict.fromkeys(min(columns, most) for columns in prompt_lengths)
    sized = [(rows, columns) for columns in lengths for rows in dict.fromkeys(batch_sizes)]
    num_layers = len(decoder_layers(inner))
    timed = _measure(model, sized, weights, repeats, steps, advance)
    costs = [_cost(rows, repeats_of, num_layers) for (rows, _), repeats_of in zip(sized, timed, strict=True)]
    batches = [
        TimedBatch(
            rows,
            columns,
            columns + (SHORT + steps) // 2,
            cost.seconds_by_layers,
            cost.prefill,
            cost.start,
            cost.stopped_share,
            cost.cold,
        )
        for (rows, columns), cost in zip(sized, costs, strict=True)
    ]
    sizes = CostModel.of(inner)
    today = datetime.date.today().isoformat()
    profile = Profile(setting_of(inner, sizes, weights), sizes.num_layers, tuple(batches), today)
    spreads = (Spread(*size, _spread(each, num_layers)) for size, each in zip(sized, timed, strict=True))
    return Calibration(profile, tuple(spreads))


def relative_times(repeats: Sequence[Mapping[int, float]], units: Sequence[float]) -> dict[int, float]:
    """The time of each depth over a time of full depth's, medians over repeats; more layers take no less.

    Two times count together only where they were taken within seconds, so a machine whose speed drifts treats both
    alike, and where it was busy for one of them the ratio is an outlier, which a median leaves out.

    Args:
        repeats: of each, layers -> seconds.
        units: of each, the seconds that they are told in.
    """
    depths = sorted(repeats[0])
    shares = [statistics.median(times[n] / unit for times, unit in zip(repeats, units, strict=True)) for n in depths]
    return dict(zip(depths, accumulate(shares, max), strict=True))
