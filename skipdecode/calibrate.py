"""Timing a model's decode steps on the machine at hand, for schedules that meet their target there."""

import statistics
from typing import Any

import torch
from torch import nn
from transformers import StoppingCriteriaList

from skipdecode.clock import StepClock
from skipdecode.cost import MeasuredCost
from skipdecode.decode import skip_generate
from skipdecode.families import decoder_layers, text_config, unwrap
from skipdecode.projections import Weights
from skipdecode.schedule import SkipSchedule

# Depths that are timed, evenly spaced from all layers down to one.
DEPTHS = 8


def measure_cost(
    model: nn.Module,
    *,
    batch_size: int = 1,
    prompt_length: int = 64,
    weights: Weights | None = None,
    repeats: int = 5,
    tread: int = 8,
) -> MeasuredCost:
    """Time decode steps of a few depths through `skip_generate`, everything between two tokens included.

    Each repeat is a generation whose budget goes down a staircase of depths, with one at full depth before and one
    after it. A target is a ratio to full depth, so each repeat gives the ratios of its own times, and their medians
    over repeats count: a machine whose speed drifts, or that is busy for a second, treats all depths alike. Full depth
    has generations of its own, as the steps right after a prefill, where the staircase begins, are slower than later
    ones.

    Args:
        model: a causal language model, on the device and in the type that it will decode in.
        batch_size: rows that decode together.
        prompt_length: columns in the cache when decoding starts; fewer where the model hasn't the positions.
        weights: what decode steps compute with, as in `skip_generate`.
        repeats: of the three generations, after one that warms up.
        tread: steps at each depth; the first of them, which may find caches cold, isn't counted, and at full depth as
            many steps again come before.

    Raises:
        ConfigError: for a family that isn't known.
    """
    num_layers = len(decoder_layers(model))
    depths = min(DEPTHS, num_layers)
    steps = tread * depths
    staircase = SkipSchedule(num_layers, num_layers, 1, horizon=steps, decay="step", decay_rate=depths)
    full_depth = SkipSchedule.full_depth(num_layers, steps)
    inner: Any = unwrap(model)
    config = text_config(inner.config)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None:
        prompt_length = max(1, min(prompt_length, positions - steps))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (batch_size, prompt_length), generator=generator).to(inner.device)

    def time_steps(schedule: SkipSchedule, count: int) -> list[float]:
        clock = StepClock(inner.device)
        inner.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            custom_generate=skip_generate,
            schedule=schedule,
            weights=weights,
            max_new_tokens=count + 1,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        return clock.step_seconds

    full_seconds: list[float] = []
    ratios: dict[int, list[float]] = {staircase.budget(i): [] for i in range(steps)}
    training = inner.training
    inner.eval()
    try:
        for repeat in range(repeats + 1):
            before, stairs, after = (
                time_steps(schedule, count)
                for schedule, count in ((full_depth, 2 * tread), (staircase, steps), (full_depth, 2 * tread))
            )
            if repeat == 0:
                continue
            full = statistics.median(before[tread + 1 :] + after[tread + 1 :])
            full_seconds.append(full)
            for depth, found in ratios.items():
                settled = [seconds for i, seconds in enumerate(stairs) if staircase.budget(i) == depth and i % tread]
                found.append(statistics.median(settled) / full if depth < num_layers else 1.0)
    finally:
        inner.train(training)
    scale = statistics.median(full_seconds)
    return MeasuredCost(num_layers, {depth: scale * statistics.median(found) for depth, found in ratios.items()})
