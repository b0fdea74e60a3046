"""Timing a model's decode steps on the machine at hand, for schedules that meet their target there."""

import datetime
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from transformers import StoppingCriteriaList

from skipdecode.clock import StepClock
from skipdecode.cost import CostModel, MeasuredCost
from skipdecode.decode import skip_generate
from skipdecode.errors import ConfigError, check_counts
from skipdecode.families import decoder_layers, text_config, unwrap
from skipdecode.lean import usual_weights
from skipdecode.profile import Profile, TimedBatch, setting_of
from skipdecode.projections import Weights
from skipdecode.schedule import SkipSchedule

# Depths that are timed, as shares of all layers, and one layer: closer together where few layers run, as these stay in
# a processor's caches and cost less each.
DEPTHS = (1 / 6, 1 / 3, 2 / 3, 1)


def measure_cost(
    model: nn.Module,
    *,
    batch_size: int = 1,
    prompt_length: int = 64,
    weights: Weights | None = None,
    repeats: int = 8,
    steps: int = 16,
) -> MeasuredCost:
    """Time decode steps of a few depths, and the prompts' pass, through `skip_generate`, with all that lies between.

    Each repeat is a generation at each depth, over the same columns. Depths are told from one another within a repeat
    (`relative_times`).

    Args:
        model: a causal language model, on the device and in the type that it will decode in.
        batch_size: rows that decode together.
        prompt_length: columns in the cache when decoding starts; fewer where the model hasn't the positions.
        weights: what decode steps compute with, as in `skip_generate`.
        repeats: of the generations, after one that warms up.
        steps: of each; the first of them, which may find caches cold, isn't counted.

    Raises:
        ConfigError: for a family that isn't known, a model of one layer, and counts below 1.
    """
    return _measure(model, [(batch_size, prompt_length)], weights, repeats, steps)[0]


def _measure(
    model: nn.Module,
    batches: Sequence[tuple[int, int]],
    weights: Weights | None,
    repeats: int,
    steps: int = 16,
    advance: Callable[[], None] = lambda: None,
) -> list[MeasuredCost]:
    """The costs of batches, of rows and columns of their prompts, which take turns in each repeat."""
    for rows, columns in batches:
        check_counts(batch_size=rows, prompt_length=columns, repeats=repeats, steps=steps)
    num_layers = len(decoder_layers(model))
    if num_layers < 2:
        raise ConfigError(f"the model has {num_layers} layer: there are no depths to time apart")
    depths = sorted({1, *(max(1, round(share * num_layers)) for share in DEPTHS)})
    inner: Any = unwrap(model)
    timed: list[list[dict[int, tuple[float, float]]]] = [[] for _ in batches]
    training = inner.training
    inner.eval()
    try:
        for repeat in range(repeats + 1):
            for (rows, columns), found in zip(batches, timed, strict=True):
                times = {depth: _time_depth(inner, depth, rows, columns, weights, steps) for depth in depths}
                if repeat:  # the first warms up
                    found.append(times)
            advance()
    finally:
        inner.train(training)
    return [_cost(rows, found, num_layers) for (rows, _), found in zip(batches, timed, strict=True)]


def _time_depth(
    inner: Any, depth: int, rows: int, columns: int, weights: Weights | None, steps: int
) -> tuple[float, float]:
    """The seconds of the prompts' pass and of a step, both through so many layers."""
    config = text_config(inner.config)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None:
        columns = max(1, min(columns, positions - steps))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (rows, columns), generator=generator).to(inner.device)
    clock = StepClock(inner.device)
    inner.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        custom_generate=skip_generate,
        schedule=SkipSchedule(len(decoder_layers(inner)), depth, depth, prompt="max"),
        weights=weights,
        max_new_tokens=steps + 1,
        do_sample=False,
        eos_token_id=config.vocab_size,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    return clock.prefill_seconds, statistics.median(clock.step_seconds[1:] or clock.step_seconds)


def _cost(rows: int, timed: Sequence[Mapping[int, tuple[float, float]]], num_layers: int) -> MeasuredCost:
    """The cost of a batch: in each repeat depth -> the seconds of its prompts' pass and of a step."""

    def medians(at: int) -> dict[int, float]:
        times = [{depth: both[at] for depth, both in repeat.items()} for repeat in timed]
        whole = statistics.median(repeat[num_layers] for repeat in times)
        return {depth: whole * share for depth, share in relative_times(times, num_layers).items()}

    return MeasuredCost(num_layers, medians(1), rows, prefill=medians(0))


def measure_profile(
    model: nn.Module,
    *,
    batch_sizes: Sequence[int],
    prompt_lengths: Sequence[int],
    weights: Weights | None = None,
    repeats: int = 8,
    advance: Callable[[], None] = lambda: None,
) -> Profile:
    """Time batches of every size behind prompts of every length, as `measure_cost`; `save` keeps the profile.

    They take turns in each repeat, so that on a machine whose speed drifts they compare.

    Args:
        model: as in `measure_cost`.
        batch_sizes: rows that decode together.
        prompt_lengths: columns in the cache when decoding starts.
        weights: as in `measure_cost`.
        repeats: as in `measure_cost`.
        advance: called after each repeat, and after the one that warms up.

    Raises:
        ConfigError: as `measure_cost` does.
    """
    inner: Any = unwrap(model)
    weights = weights or usual_weights(inner)
    sized = [(rows, columns) for columns in prompt_lengths for rows in batch_sizes]
    costs = _measure(model, sized, weights, repeats, advance=advance)
    batches = [TimedBatch(*size, c.seconds_by_layers, c.prefill) for size, c in zip(sized, costs, strict=True)]
    sizes = CostModel.of(inner)
    today = datetime.date.today().isoformat()
    return Profile(setting_of(inner, sizes, weights), sizes.num_layers, tuple(batches), today)


def relative_times(repeats: Sequence[Mapping[int, float]], num_layers: int) -> dict[int, float]:
    """The time of each depth over that of all layers, medians over repeats; more layers take no less.

    Two times count together only where they were taken within seconds, so a machine whose speed drifts treats both
    alike, and where it was busy for one of them the ratio is an outlier, which a median leaves out.

    Args:
        repeats: of each, layers -> seconds.
        num_layers: those of full depth.
    """
    depths = sorted(repeats[0])
    shares = [statistics.median(times[depth] / times[num_layers] for times in repeats) for depth in depths]
    return dict(zip(depths, accumulate(shares, max), strict=True))
