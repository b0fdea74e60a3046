"""Placements of layers for drawn schedules, orders of every kind among them."""

from typing import Any

from hypothesis import strategies as st


@st.composite
def orders(draw: st.DrawFn, num_layers: int, warmup_layers: int = 1) -> tuple[int, ...]:
    """Any order that a schedule may have: the warm-up layers first, among themselves in any order, then the rest."""
    lowest = draw(st.permutations(range(warmup_layers)))
    return (*lowest, *draw(st.permutations(range(warmup_layers, num_layers))))


@st.composite
def placements(draw: st.DrawFn, num_layers: int, warmup_layers: int, *, even: bool = True) -> dict[str, Any]:
    """The fields `placement` and, for "order", `order` of a schedule; each of the other placements as often."""
    names = ["top", "bottom", "ends", "order", *["even"] * even]
    placement = draw(st.sampled_from(names))
    if placement != "order":
        return {"placement": placement}
    return {"placement": placement, "order": draw(orders(num_layers, warmup_layers))}
