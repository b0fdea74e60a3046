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
    repeats: int = 3,
    tread: int = 8,
) -> MeasuredCost:
    """Time decode steps of a few depths through `skip_generate`, everything between two tokens included.

    Each repeat is a generation at full depth and one whose budget goes down a staircase of depths, so that a machine
    whose speed drifts treats them alike; a step's time is the median over repeats and steps. Full depth has a
    generation of its own since the steps right after a prefill, where the staircase begins, are slower than later ones.

    Args:
        model: a causal language model, on the device and in the type that it will decode in.
        batch_size: rows that decode together.
        prompt_length: columns in the cache when decoding starts; fewer where the model hasn't the positions.
        weights: what decode steps compute with, as in `skip_generate`.
        repeats: generations, after one that warms up.
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
    found: dict[int, list[float]] = {staircase.budget(i): [] for i in range(steps)}
    training = inner.training
    inner.eval()
    try:
        for repeat in range(repeats + 1):
            for schedule, count in ((full_depth, min(2 * tread, steps)), (staircase, steps)):
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
                for i, seconds in enumerate(clock.step_seconds if repeat > 0 else []):
                    settled = i >= count - tread if schedule is full_depth else schedule.budget(i) < num_layers
                    if settled and i % tread:
                        found[schedule.budget(i)].append(seconds)
    finally:
        inner.train(training)
    return MeasuredCost(num_layers, {depth: statistics.median(times) for depth, times in found.items()})
