"""Systems take turns, and nothing in the journal is decoded again. The systems are fakes that count calls."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_checkpoints import TASK

from data import load_task
from eval.decoding import DecodedSet, spread_over_lengths, take_turns
from eval.journal import Journal
from eval.systems.base import DecodedBatch, System
from skipdecode.timing.interleave import Ratio, order_of_turn

EXAMPLES = load_task("departures", **TASK).load("test")
PROMPTS = [[7] * (3 + len(example.prompt) % 5) for example in EXAMPLES]


class Counting(System):
    """Returns its name and the prompt's length, and records each call."""

    kind = "skip"
    cached: Any = None

    def __init__(self, label: str, calls: list[Any]) -> None:
        self.label = label
        self.speedup_target = None
        self.calls = calls

    def _continue(self, model: Any, request: Any) -> Any: ...

    def decode(
        self, prompts: Any, max_new_tokens: int, lengths: Any = None, *, agreement: bool = False
    ) -> DecodedBatch:
        self.calls.append((self.label, [len(prompt) for prompt in prompts], max_new_tokens, lengths))
        texts = [f" {self.label} {len(prompt)}" for prompt in prompts]
        seconds = float(len(self.calls))
        return DecodedBatch(texts, lengths or [3] * len(texts), seconds, seconds, 2, 3, 4, 5)


def decode(
    labels: str,
    batch_size: int,
    journal: Journal,
    calls: list[Any],
    lengths: list[int] | None = None,
    first_turn: int = 0,
) -> list[Any]:
    task, systems = load_task("departures", **TASK), [Counting(label, calls) for label in labels]
    results: list[Any] = []
    sizes: Any = {"batch_size": batch_size, "max_new_tokens": 20, "first_turn": first_turn}
    for so_far in take_turns(systems, task, EXAMPLES, PROMPTS, **sizes, journal=journal, lengths=lengths):
        results = so_far
    return [(r.system.label, r.predictions, r.decode_seconds, r.lengths) for r in results]


class Killed(Exception):
    pass


class Mortal(list[Any]):
    """A list of calls that raises before a given call that decodes a batch."""

    def __init__(self, left: int) -> None:
        self.left = left

    def append(self, call: Any) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1
        super().append(call)


def timed(calls: list[Any]) -> list[Any]:
    return [call for call in calls if call[2] == 20]


@given(
    batch_size=st.integers(1, 16),
    labels=st.sampled_from(["a", "ab", "abc"]),
    kills=st.lists(st.integers(0, 12), max_size=4),
    lengths=st.none() | st.just([1 + n % 20 for n in range(len(EXAMPLES))]),
)
def test_decoding_killed_at_any_call_continues_with_equal_results_and_decodes_nothing_twice(
    batch_size: int, labels: str, kills: list[int], lengths: list[int] | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    straight: list[Any] = []
    expected = decode(labels, batch_size, Journal(), straight, lengths)
    assert all(made == (lengths or [3] * len(EXAMPLES)) for *_, made in expected)
    path: Path = tmp_path_factory.mktemp("turns") / "journal.jsonl"
    calls: list[Any] = []
    for left in kills:
        mortal = Mortal(left)
        try:
            decode(labels, batch_size, Journal(path), mortal, lengths)
        except Killed:
            calls += mortal
            continue
        calls += mortal
        break
    last: list[Any] = []
    found = decode(labels, batch_size, Journal(path), last, lengths)
    calls += last
    assert sorted(timed(calls)) == sorted(timed(straight))
    assert [(label, texts, made) for label, texts, _, made in found] == [
        (label, texts, made) for label, texts, _, made in expected
    ]
    again: list[Any] = []
    assert decode(labels, batch_size, Journal(path), again, lengths) == found  # including the times
    assert again == []


@given(count=st.integers(1, 12), rounds=st.integers(0, 5))
def test_every_system_is_first_equally_often_and_orders_alternate_direction(count: int, rounds: int) -> None:
    systems = range(count)
    first = Counter(order_of_turn(systems, 2 * count * rounds + turn)[0] for turn in range(2 * count))
    assert first == dict.fromkeys(systems, 2)
    for turn in range(0, 2 * count, 2):
        forwards, backwards = order_of_turn(systems, turn), order_of_turn(systems, turn + 1)
        assert sorted(forwards) == list(systems)
        assert {forwards.index(system) + backwards.index(system) for system in systems} == {count - 1}


def test_systems_take_turns_and_are_warmed_up_before_timing() -> None:
    calls: list[Any] = []
    decode("abc", 5, Journal(), calls)
    assert [call[0] for call in timed(calls)] == ["a", "b", "c", "c", "b", "a", "b", "c", "a"]
    again: list[Any] = []  # repeated batches continue the order of turns
    decode("abc", 5, Journal(), again, first_turn=3)
    assert [call[0] for call in timed(again)] == ["a", "c", "b", "c", "a", "b", "b", "a", "c"]
    for label in "abc":
        first, second, *_ = (call for call in calls if call[0] == label)
        assert (first[2], second[2]) == (8, 20)
        assert first[1] == second[1]


def test_batches_hold_prompts_of_similar_length_and_predictions_keep_the_order_of_examples() -> None:
    calls: list[Any] = []
    ((_, predictions, _, _),) = decode("a", 4, Journal(), calls)
    assert [length for call in timed(calls) for length in call[1]] == sorted(map(len, PROMPTS))
    assert predictions == [f"a {len(prompt)}" for prompt in PROMPTS]


def decoded(prefill: list[float], decoding: list[float], steps: list[int]) -> DecodedSet:
    turns = [DecodedBatch([], [], p, d, n, 0, 0, 0) for p, d, n in zip(prefill, decoding, steps, strict=True)]
    return DecodedSet(Counting("a", []), [], [], turns)


def test_a_speedup_is_the_median_over_batches_for_decode_and_end_to_end() -> None:
    full = decoded([2.0, 2.0, 1.0], [4.0, 8.0, 0.0], [2, 3, 0])
    fast = decoded([2.0, 1.0, 0.5], [1.0, 1.0, 0.0], [2, 3, 0])
    assert fast.speed_over(full, "decode") == Ratio(6.0, 5.0, 7.0)  # the last ended with its first tokens
    assert fast.speed_over(full, "all") == Ratio(2.0, 2.0, 3.5)  # 2, 5 and 2 times
    assert full.speed_over(full, "decode") == full.speed_over(full, "all") == Ratio(1.0, 1.0, 1.0)
    nothing = decoded([1.0], [0.0], [0])
    assert nothing.speed_over(nothing, "decode") == Ratio(1.0, 1.0, 1.0)


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=300), count=st.integers(1, 80))
def test_timed_prompts_are_spread_evenly_over_all_lengths(lengths: list[int], count: int) -> None:
    drawn = spread_over_lengths(lengths, count)
    assert len(drawn) == len(set(drawn)) == min(count, len(lengths))
    ranked = sorted(lengths)
    # Each is the middle of one of equally many parts of all prompts, in order of length.
    for number, n in enumerate(drawn):
        middle = (number + 0.5) * len(lengths) / len(drawn)
        assert ranked[max(0, int(middle) - 1)] <= lengths[n] <= ranked[min(len(lengths) - 1, int(middle) + 1)]
