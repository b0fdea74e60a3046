"""Bisection finds the threshold with the most layers that are not above the wanted number."""

from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.lineup import layers_per_token
from eval.systems.threshold import PROBES, TOLERANCE, largest_below
from skipdecode import SkipSchedule
from skipdecode.checkpoint.skip_config import SkipConfig

thresholds = st.floats(0, 1, exclude_min=True)


@given(st.lists(thresholds, min_size=1, max_size=30), st.floats(1, 12))
def test_the_threshold_is_the_largest_below_the_target_where_layers_grow_in_steps(
    steps: list[float], wanted: float
) -> None:
    """Layers per token as a step function from 1 to 12, increasing at each of `steps`."""
    tried: dict[float, float] = {}

    def mean_layers(threshold: float) -> float:
        tried[threshold] = 1 + 11 * bisect_right(sorted(steps), threshold) / len(steps)
        return tried[threshold]

    value, found = largest_below(mean_layers, wanted)
    assert found <= wanted
    assert found == tried.get(value, 1.0)
    assert found == max([1.0, *(layers for layers in tried.values() if layers <= wanted)])
    assert len(tried) <= PROBES
    if len(tried) < PROBES:
        assert wanted - found < TOLERANCE


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 30))
def test_layers_per_token_are_averaged_over_the_training_lengths(lengths: list[int], horizon: int) -> None:
    schedule = SkipSchedule(12, 9, 2, horizon=horizon)
    config = SkipConfig(solver={"horizon": 64, "lengths": [[n, lengths.count(n)] for n in sorted(set(lengths))]})
    budgets = [schedule.budget(token) for length in lengths for token in range(length)]
    assert layers_per_token(schedule, config) == pytest.approx(sum(budgets) / len(budgets))
    assert layers_per_token(schedule, SkipConfig(solver={"horizon": 64})) == schedule.mean_budget(64)


@given(st.floats(1.5, 11.9), st.floats(1, 5))
def test_the_threshold_is_close_to_the_target_where_layers_grow_evenly(wanted: float, bend: float) -> None:
    _, found = largest_below(lambda threshold: 1 + 11 * threshold**bend, wanted)
    assert wanted - TOLERANCE * 2 < found <= wanted


@given(st.floats(0.9, 0.999999))
def test_thresholds_near_1_are_distinguished(edge: float) -> None:
    """A confident model: the number of layers only changes at a threshold near 1."""
    value, found = largest_below(lambda threshold: 2.0 if threshold < edge else 12.0, 3.0)
    assert found == 2.0
    assert edge - value < 0.1 * (1 - value)


def test_the_threshold_is_0_where_no_other_is_low_enough() -> None:
    assert largest_below(lambda threshold: 12.0, 3.0) == (0.0, 1.0)
