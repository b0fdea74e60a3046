"""Distributions of sequence lengths predict the decode steps of a batch, as enumerating all batches does."""

import itertools
import json

import pytest
from drawn_schedules import schedules
from hypothesis import given
from hypothesis import strategies as st

from skipdecode import ConfigError, CostModel, SkipSchedule, solve_schedule
from skipdecode.schedule.lengths import MAX_BINS, Lengths, LengthsByPrompt

SIZES = CostModel(12, 2_000_000, 3_000_000, 1000, 700, 512, 4)
SCHEDULES = schedules(12, horizon=12)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 3), SCHEDULES)
def test_the_predicted_decoding_time_is_the_mean_over_all_possible_batches(
    sequences: list[int], rows: int, schedule: SkipSchedule
) -> None:
    lengths = Lengths.of(sequences)
    cost = SIZES.at(batch_size=rows, prompt_length=7, lengths=lengths)
    batches = list(itertools.product(sequences, repeat=rows))
    total = sum(
        cost.step_seconds(schedule.budget(i), i, rows=sum(length > i + 1 for length in batch))
        for batch in batches
        for i in range(max(batch) - 1)
    )
    # The time of a step is linear in its rows here, so the mean number of rows gives the mean time.
    assert cost.decode_seconds(schedule) == pytest.approx(total / len(batches))


PAIRS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=9)


BATCHES = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3), min_size=1, max_size=3)


@given(PAIRS, st.integers(1, 4), BATCHES, SCHEDULES)
def test_the_predicted_decoding_time_of_given_prompts_is_the_mean_over_completions_of_prompts_as_long(
    pairs: list[tuple[int, int]], groups: int, batches: list[list[int]], schedule: SkipSchedule
) -> None:
    lengths = LengthsByPrompt.of(pairs, groups)
    ordered = sorted(completion for _, completion in pairs)
    assert sorted(length for _, found in lengths.groups for length, n in found.counts for _ in range(n)) == ordered
    assert LengthsByPrompt.read(json.loads(json.dumps(lengths.to_list()))) == lengths
    cost = SIZES.at(batch_size=3, prompt_length=7, expected_steps=lengths.expected_steps(batches))

    def completions_of(prompt: int) -> list[int]:
        known = [found for longest, found in lengths.groups if prompt <= longest] or [lengths.groups[-1][1]]
        return [length for length, n in known[0].counts for _ in range(n)]

    total = 0.0
    for batch in batches:
        draws = list(itertools.product(*map(completions_of, batch)))
        for completions in draws:
            steps = range(max(completions) - 1)
            rows = [sum(length > i + 1 for length in completions) for i in steps]
            total += sum(cost.step_seconds(schedule.budget(i), i, rows[i]) for i in steps) / len(draws)
    assert cost.decode_seconds(schedule) == pytest.approx(total / len(batches))


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 12)), min_size=1, max_size=60), st.integers(5, 9))
def test_each_group_has_all_completions_of_its_prompt_lengths(pairs: list[tuple[int, int]], groups: int) -> None:
    found = LengthsByPrompt.of(pairs, groups)
    bounds = [0, *(longest for longest, _ in found.groups)]
    for below, (longest, lengths) in zip(bounds, found.groups, strict=False):
        assert lengths == Lengths.of([completion for prompt, completion in pairs if below < prompt <= longest])


def test_groups_have_about_equally_many_prompts() -> None:
    found = LengthsByPrompt.of([(n // 3 + 1, 4) for n in range(300)], groups=4)
    assert [longest for longest, _ in found.groups] == [25, 50, 75, 100]


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=300))
def test_binning_keeps_the_mean_and_the_maximum_length_within_half_and_one_bin_width(sequences: list[int]) -> None:
    lengths = Lengths.of(sequences)
    width = -(-max(sequences) // MAX_BINS)
    assert len(lengths.counts) <= MAX_BINS
    assert lengths.mean == pytest.approx(sum(sequences) / len(sequences), abs=0.5 if width > 1 else 1e-9)
    assert max(sequences) - width < lengths.longest <= max(sequences)
    assert Lengths.read(json.loads(json.dumps(lengths.to_list()))) == lengths
    for length in range(0, max(sequences) + 2, width):
        assert lengths.share_up_to(length) == pytest.approx(sum(n <= length for n in sequences) / len(sequences))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "lengths are"),
        ([0, 3], "tokens is 0"),
        ([3, 2.5], "tokens is 2.5"),
        ("abc", "lengths are|tokens is"),
        (7, "lengths are '7'"),
        ([[3, 1], [2, 1]], "ascending"),
        ([[3, 0]], "sequences is 0"),
        ([[10**9, 1]], "at most 1000000"),
    ],
)
def test_invalid_lengths_are_refused(values: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        solve_schedule(SIZES, 2, lengths=values)  # type: ignore[arg-type]


def test_sequences_of_one_token_have_no_decode_step_but_a_prefill_time() -> None:
    with pytest.raises(ConfigError, match="there is no decode step"):
        solve_schedule(SIZES, 2, lengths=[1, 1])
    schedule = solve_schedule(SIZES, 2, lengths=[1, 1], prompt_length=500, over="all")
    assert SIZES.at(lengths=[1], prompt_length=500).speedup(schedule, over="all") >= 2
    assert schedule.prompt_budget < 12
