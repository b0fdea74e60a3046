"""Systems take turns, and nothing that a journal has is decoded again. With systems that only count."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_checkpoints import TASK

from data import load_task
from eval.decoding import take_turns
from eval.journal import Journal
from eval.systems.base import DecodedBatch, System
from skipdecode.ratio import Ratio

EXAMPLES = load_task("departures", **TASK).load("test")
PROMPTS = [[7] * (3 + len(example.prompt) % 5) for example in EXAMPLES]


class Counting(System):
    """Answers with its name and the prompt's length; notes each call."""

    kind = "skip"
    cached: Any = None

    def __init__(self, label: str, calls: list[Any]) -> None:
        self.label = label
        self.speedup_target = None
        self.calls = calls

    def _continue(self, model: Any, request: Any) -> Any: ...

    def decode(self, prompts: Any, max_new_tokens: int) -> DecodedBatch:
        self.calls.append((self.label, [len(prompt) for prompt in prompts], max_new_tokens))
        texts = [f" {self.label} {len(prompt)}" for prompt in prompts]
        seconds = float(len(self.calls))
        return DecodedBatch(texts, seconds, seconds, 2, 2 * len(texts), 3, 4, 5)


def decode(labels: str, batch_size: int, journal: Journal, calls: list[Any]) -> list[Any]:
    task, systems = load_task("departures", **TASK), [Counting(label, calls) for label in labels]
    results: list[Any] = []
    for so_far in take_turns(
        systems, task, EXAMPLES, PROMPTS, batch_size=batch_size, max_new_tokens=20, journal=journal
    ):
        results = so_far
    return [(r.system.label, r.predictions, r.decode_seconds, r.tokens) for r in results]


class Killed(Exception):
    pass


class Mortal(list[Any]):
    """A list of calls whose writer is killed before a call that decodes a batch."""

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
)
def test_killed_at_any_call_nothing_is_decoded_twice_and_the_results_are_the_same(
    batch_size: int, labels: str, kills: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    straight: list[Any] = []
    expected = decode(labels, batch_size, Journal(), straight)
    path: Path = tmp_path_factory.mktemp("turns") / "journal.jsonl"
    calls: list[Any] = []
    for left in kills:
        mortal = Mortal(left)
        try:
            decode(labels, batch_size, Journal(path), mortal)
        except Killed:
            calls += mortal
            continue
        calls += mortal
        break
    last: list[Any] = []
    found = decode(labels, batch_size, Journal(path), last)
    calls += last
    assert sorted(timed(calls)) == sorted(timed(straight))
    assert [(label, texts, tokens) for label, texts, _, tokens in found] == [
        (label, texts, tokens) for label, texts, _, tokens in expected
    ]
    again: list[Any] = []
    assert decode(labels, batch_size, Journal(path), again) == found  # clocks too, as they were
    assert again == []


def test_systems_take_turns_in_an_order_that_rotates_and_are_warm_before_they_are_timed() -> None:
    calls: list[Any] = []
    decode("abc", 5, Journal(), calls)
    assert [call[0] for call in timed(calls)] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    for label in "abc":
        first, second, *_ = (call for call in calls if call[0] == label)
        assert (first[2], second[2]) == (8, 20)
        assert first[1] == second[1]


def test_batches_hold_prompts_of_like_length_and_predictions_come_in_the_order_of_examples() -> None:
    calls: list[Any] = []
    ((_, predictions, _, _),) = decode("a", 4, Journal(), calls)
    assert [length for call in timed(calls) for length in call[1]] == sorted(map(len, PROMPTS))
    assert predictions == [f"a {len(prompt)}" for prompt in PROMPTS]


def test_a_speed_is_the_median_over_batches_that_both_decoded() -> None:
    from eval.decoding import DecodedSet

    def decoded(seconds: list[float], steps: list[int]) -> DecodedSet:
        turns = [DecodedBatch([], 0.0, s, n, 0, 0, 0, 0) for s, n in zip(seconds, steps, strict=True)]
        return DecodedSet(Counting("a", []), [], turns)

    full = decoded([4.0, 6.0, 1.0, 9.0], [2, 2, 0, 3])
    fast = decoded([1.0, 1.0, 1.0, 0.0], [1, 1, 1, 0])
    assert fast.speed_over(full) == Ratio(2.5, 2.25, 2.75)
    assert full.speed_over(full) == Ratio(1.0, 1.0, 1.0)
    assert decoded([0.0], [0]).speed_over(decoded([1.0], [1])) == Ratio(1.0, 1.0, 1.0)
