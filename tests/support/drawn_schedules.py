"""Drawn schedules of every kind."""

from typing import Any

from hypothesis import strategies as st

from skipdecode import SkipSchedule

DECAYS = ["linear", "constant", "power", "exponential", "cosine", "step"]


@st.composite
def orders(draw: st.DrawFn, num_layers: int, warmup_layers: int = 1) -> tuple[int, ...]:
    """Any order that a schedule may have: the warm-up layers first, among themselves in any order, then the rest."""
    lowest = draw(st.permutations(range(warmup_layers)))
    return (*lowest, *draw(st.permutations(range(warmup_layers, num_layers))))


@st.composite
def schedules(draw: st.DrawFn, depth: Any, horizon: int, *, even: bool = True) -> SkipSchedule:
    """Any schedule of this depth (a number, or a strategy of numbers), with a horizon up to this."""
    depth = depth if isinstance(depth, int) else draw(depth)
    max_layers = draw(st.integers(1, depth))
    min_layers = draw(st.integers(1, max_layers))
    warmup = draw(st.integers(1, min_layers))
    decay = draw(st.sampled_from(DECAYS))
    placement = draw(st.sampled_from(["top", "bottom", "ends", "order", *["even"] * even]))
    rates = {"step": st.integers(2, 9), "power": st.floats(0.05, 20), "exponential": st.floats(0.05, 20)}
    return SkipSchedule(
        num_layers=depth,
        max_layers=max_layers,
        min_layers=min_layers,
        warmup_layers=warmup,
        horizon=draw(st.integers(1, horizon)),
        decay=decay,
        prompt=draw(st.sampled_from(["full", "max"]) | st.integers(max_layers, depth)),
        decay_rate=draw(st.none() | rates.get(decay, st.none())),
        prompt_stop=draw(st.none() | st.integers(warmup, depth)),
        placement=placement,
        order=draw(orders(depth, warmup)) if placement == "order" else None,
    )
