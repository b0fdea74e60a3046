"""Every rank and every resumed run samples the same schedules."""

import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipdecode import ConfigError, CostModel, SkipSchedule, solve_schedule
from skipdecode.training.sampling import ScheduleSampler, make_sampler

COST = CostModel(12, 1000, 500, 10, 100, 20, 4)
SOLVER = {"horizon": 16}


def sampler(seed: int = 0, **changes: object) -> ScheduleSampler:
    request = {"speedups": [1, 2, 3], "solver": SOLVER, **changes}
    return make_sampler(COST, seed=seed, **request)  # type: ignore[arg-type]


@given(st.integers(0, 2**31), st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_sampled_schedules_depend_only_on_seed_and_step(seed: int, steps: list[int]) -> None:
    first, second = sampler(seed), sampler(seed)
    for other in range(3):
        second.at(other)  # earlier draws change nothing
    assert [first.at(step) for step in steps] == [second.at(step) for step in reversed(steps)][::-1]


def test_a_process_with_another_hash_seed_samples_the_same_schedules() -> None:
    code = (
        "from skipdecode.training.sampling import ScheduleSampler;"
        "s = ScheduleSampler((1., 2., 3.), (1, 2, 3), (1., 2., 3.), 5); print([s.at(n)[0].speedup for n in range(50)])"
    )
    here = ScheduleSampler((1.0, 2.0, 3.0), (1, 2, 3), (1.0, 2.0, 3.0), 5)  # type: ignore[arg-type]
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert there.stdout.strip() == str([here.at(n)[0].speedup for n in range(50)])


def test_schedules_are_sampled_in_proportion_to_their_weights() -> None:
    weighted = sampler(weights=[1, 0.5, 3])
    draws = Counter(weighted.at(step)[0].speedup for step in range(4000))
    assert draws[1.0] / draws[2.0] == pytest.approx(2, rel=0.15)
    assert draws[3.0] / draws[1.0] == pytest.approx(3, rel=0.15)


def test_different_seeds_sample_different_schedules() -> None:
    assert [sampler(1).at(n)[0].speedup for n in range(30)] != [sampler(2).at(n)[0].speedup for n in range(30)]


def test_each_target_gets_its_solved_schedule() -> None:
    drawn = sampler()
    expected = {speedup: solve_schedule(COST, speedup, horizon=16) for speedup in (1, 2, 3)}
    assert dict(zip(drawn.speedups, drawn.schedules, strict=True)) == expected


def test_the_target_of_a_given_schedule_is_its_predicted_speedup() -> None:
    own = [SkipSchedule(12, 12, 12, horizon=16), SkipSchedule(12, 6, 2, horizon=16, placement="ends")]
    drawn = sampler(speedups=None, schedules=own)
    assert drawn.schedules == tuple(own)
    assert drawn.speedups == (1.0, round(COST.at().speedup(own[1]), 2))


def test_a_range_of_targets_is_sampled_uniformly() -> None:
    drawn = sampler(speedups=None, speedup_range=[1, 4])
    targets = [drawn.at(step)[0].speedup for step in range(3000)]
    assert (min(targets), max(targets)) == (1.0, 4.0)
    assert sum(targets) / len(targets) == pytest.approx(2.5, abs=0.1)


def test_targets_of_a_range_equal_their_printed_values() -> None:
    ends = [1.0000001, 3]
    speedups = sampler(speedups=None, speedup_range=ends).speedups
    assert [speedups[0], speedups[-1]] == ends
    assert all(speedup == float(f"{speedup:g}") for speedup in speedups[1:])
    assert 1.2 in speedups


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speedup_range": [1, 2]}, "exactly one of"),
        ({"speedups": None}, "exactly one of"),
        ({"speedups": []}, "list at least one target"),
        ({"speedups": [2, 2]}, "list each once"),
        ({"speedups": None, "schedules": [SkipSchedule(24, 8, 4)]}, "is for 24 layers, the model has 12"),
        ({"weights": [1, 2]}, "expected 3 weights"),
        ({"weights": [1, -1, 1]}, "3 weights above 0"),
        ({"weights": [0, 1, 1]}, "remove a target that should never be sampled"),
        ({"weights": [1, 1, 0], "sampling": "sandwich"}, "remove a target that should never be sampled"),
        ({"speedups": None, "speedup_range": [3, 2]}, r"expected \[lowest, highest\]"),
        ({"speedups": [1, 99]}, "reaches at most"),
        ({"speedups": None, "speedup_range": [1, 2], "sampling": "all"}, "means 31 targets"),
    ],
)
def test_an_invalid_distribution_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sampler(**change)


def test_sandwich_sampling_gives_the_slowest_the_fastest_and_one_in_between() -> None:
    drawn = sampler(speedups=[3, 1, 1.5, 2], sampling="sandwich")
    between = Counter()
    for step in range(300):
        slowest, middle, fastest = drawn.at(step)
        assert (slowest.speedup, fastest.speedup) == (1, 3)
        assert all(draw.schedule == solve_schedule(COST, draw.speedup, horizon=16) for draw in drawn.at(step))
        between[middle.speedup] += 1
    assert set(between) == {1.5, 2}
    assert between[2] == pytest.approx(150, rel=0.25)


def test_with_sampling_all_each_step_runs_every_target_slowest_first() -> None:
    drawn = sampler(speedups=[3, 1, 1.5, 2], sampling="all")
    for step in range(5):
        assert [draw.speedup for draw in drawn.at(step)] == [1, 1.5, 2, 3]


def test_sandwich_sampling_of_one_or_two_targets_gives_these() -> None:
    assert [draw.speedup for draw in sampler(speedups=[2, 1], sampling="sandwich").at(0)] == [1, 2]
    assert [draw.speedup for draw in sampler(speedups=[2], sampling="sandwich").at(0)] == [2]
