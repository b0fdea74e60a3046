"""The schedules of a search are valid, reach the budget over the same steps, and differ from each other."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.search.space import MAX_EXCESS, Budget, LayerCount, Space, behaviour, choose_schedules
from skipdecode import ConfigError, CostModel, MeasuredCost, SkipSchedule, solve_schedule
from skipdecode.schedule.cost import Cost
from skipdecode.schedule.schedule import Decay, Placement

DECAYS: tuple[Decay, ...] = ("linear", "constant", "power", "exponential", "cosine", "step")
PLACEMENTS: tuple[Placement, ...] = ("top", "bottom", "even", "ends")


def a_cost(layers: int, head: int) -> Cost:
    return CostModel(layers, 1_000_000, head * 1_000_000, 0, 500, 500, 2).at()


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    layers = draw(st.integers(2, 16))
    kind = draw(st.sampled_from(["predicted", "measured", "layers"]))
    cost = a_cost(layers, draw(st.integers(0, 3)))
    if kind == "measured":
        cost = MeasuredCost(layers, {1: 1.0, layers: draw(st.floats(1.5, 1.0 * layers))})
    if kind == "layers":
        cost = LayerCount(layers)
    fastest = cost.speedup(SkipSchedule(layers, 1, 1))
    return Budget(cost, draw(st.floats(1.01, max(1.02, 0.99 * fastest))), steps=draw(st.integers(2, 40)))


@settings(max_examples=40)
@given(
    budget=budgets(),
    warmups=st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True).map(tuple),
    decays=st.lists(st.sampled_from(DECAYS), min_size=1, max_size=3, unique=True).map(tuple),
    horizons=st.lists(st.integers(1, 60), min_size=1, max_size=3, unique=True).map(tuple),
    placements=st.lists(st.sampled_from(PLACEMENTS), min_size=1, max_size=2, unique=True).map(tuple),
    trials=st.integers(2, 8),
    seed=st.integers(0, 2**31),
)
def test_every_schedule_of_a_search_reaches_the_budget_and_no_two_are_equivalent(
    budget: Budget,
    warmups: tuple[int, ...],
    decays: tuple[Decay, ...],
    horizons: tuple[int, ...],
    placements: tuple[Placement, ...],
    trials: int,
    seed: int,
) -> None:
    depth, tokens = budget.cost.num_layers, 50
    space = Space(warmups, decays, horizons, placements)
    try:
        default = solve_schedule(budget.cost, budget.speedup, horizon=budget.steps)
    except ConfigError:
        return
    try:
        schedules = choose_schedules(budget, space, default, trials=trials, tokens=tokens, seed=seed)
    except ConfigError as error:
        if "no schedule besides the default reaches the target" not in str(error):
            raise
        return
    assert schedules[0] == default
    assert 2 <= len(schedules) <= trials
    full = budget.cost.decode_seconds(SkipSchedule.full_depth(depth), budget.steps)
    highest = max(budget.speedup * (1 + MAX_EXCESS), full / budget.cost.decode_seconds(default, budget.steps))
    for schedule in schedules[1:]:
        # Summed over the steps of the budget, independently of the horizon.
        reached = full / budget.cost.decode_seconds(schedule, budget.steps)
        assert budget.speedup <= reached * (1 + 1e-9)
        assert reached <= highest * (1 + 1e-9)
        assert schedule.warmup_layers in warmups
        assert schedule.decay in decays
        assert schedule.horizon in horizons
        assert schedule.placement in placements
        # Law 2, and law 1 for every pair of steps.
        assert 1 <= schedule.warmup_layers <= schedule.min_layers <= schedule.max_layers <= depth
        sets = [set(schedule.layers_at(i)) for i in range(tokens)]
        assert all(later <= earlier for earlier, later in pairwise(sets))
    ran = [tuple(tuple(schedule.layers_at(i)) for i in range(tokens)) for schedule in schedules]
    assert len(set(ran)) == len(ran)


def test_equal_seeds_draw_equal_schedules_and_different_seeds_different_ones() -> None:
    budget = Budget(a_cost(24, 2), 3, steps=32)
    default = solve_schedule(budget.cost, 3, horizon=32)
    space = Space((1, 2, 3), DECAYS, (16, 32, 64), ("top",))

    def draw(seed: int) -> list[SkipSchedule]:
        return choose_schedules(budget, space, default, trials=20, tokens=96, seed=seed)

    assert draw(3) == draw(3) != draw(4)
    assert len(draw(3)) == 20
    assert {schedule.warmup_layers for schedule in draw(3)} == {1, 2, 3}
    assert len({schedule.decay for schedule in draw(3)}) == 6
    assert {schedule.horizon for schedule in draw(3)} == {16, 32, 64}


def test_schedules_that_run_the_same_layers_are_tried_once() -> None:
    """With max = min neither decay nor horizon makes a difference."""
    flat = [SkipSchedule(8, 4, 4, horizon=h, decay=d) for h in (4, 9) for d in ("linear", "cosine")]  # type: ignore[arg-type]
    assert len({behaviour(schedule, 20) for schedule in flat}) == 1
    assert behaviour(flat[0], 20) != behaviour(SkipSchedule(8, 4, 4, warmup_layers=2), 20)
    assert behaviour(flat[0], 20) != behaviour(SkipSchedule(8, 4, 4, prompt="max"), 20)
    # Only the generated tokens count.
    long, longer = SkipSchedule(8, 8, 2, horizon=64, decay="constant"), SkipSchedule(8, 8, 2, 1, 80, "constant")
    assert behaviour(long, 40) == behaviour(longer, 40) != behaviour(longer, 70)


def test_a_long_horizon_does_not_lead_to_a_slower_schedule() -> None:
    """Predicted over its own horizon, a schedule with twice the horizon could have more layers."""
    cost = a_cost(24, 0)
    budget = Budget(cost, 3, steps=32)
    default = solve_schedule(cost, 3, horizon=32)
    found = choose_schedules(budget, Space((1,), ("linear",), (64,), ("top",)), default, trials=4, tokens=96)
    over_its_own = solve_schedule(cost, 3, horizon=64, spread=1)
    assert budget.predicted(over_its_own) < 2.5
    assert all(budget.predicted(schedule) >= 3 for schedule in found)


def test_with_known_output_lengths_every_schedule_reaches_the_budget_over_them() -> None:
    """Half of the outputs end early, so over the horizon a schedule with late decay would look faster than it is."""
    cost = CostModel(24, 1_000_000, 0, 0, 500, 500, 2).at(lengths=[[4, 50], [32, 50]])
    default = solve_schedule(cost, 3, horizon=32)
    budget = Budget(cost, 3, steps=32)
    found = choose_schedules(budget, Space((1,), DECAYS, (16, 32), ("top",)), default, trials=8, tokens=64)
    assert len(found) == 8
    assert all(cost.speedup(schedule) >= 3 for schedule in found)
    assert any(cost.speedup(schedule, 32) >= 3.3 for schedule in found)


def test_a_budget_in_layers_is_the_mean_number_of_layers() -> None:
    cost = LayerCount(24)
    budget = Budget(cost, 24 / 7, steps=32)
    default = solve_schedule(cost, 24 / 7, horizon=32)
    found = choose_schedules(budget, Space((1, 2), DECAYS, (16, 32, 48), ("top",)), default, trials=12, tokens=64)
    assert len(found) == 12
    assert all(7 / (1 + MAX_EXCESS) <= schedule.mean_budget(32) <= 7 for schedule in found)


def test_a_search_without_alternatives_to_the_default_is_refused() -> None:
    cost = a_cost(6, 0)
    default = solve_schedule(cost, 5.5, horizon=16)
    with pytest.raises(ConfigError, match=r"no schedule besides the default .*warmup_layers = min_layers = 3"):
        choose_schedules(Budget(cost, 5.5, 16), Space((3,), ("linear",), (16,), ("top",)), default, trials=4, tokens=9)
    with pytest.raises(ConfigError, match="--warmup is"):
        Space((0,), ("linear",), (16,), ("top",))
