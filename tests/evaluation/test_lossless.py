"""The speed of lossless decoding on some texts: what is decoded, and the median of their ratios."""

from dataclasses import replace
from typing import Any

import pytest
from fastpath_cases import tiny
from rich.console import Console

from data import Example
from data.vocabulary import train_tokenizer
from eval.lossless import time_lossless
from eval.systems.base import Checkpoint, LosslessSystem, SkipSystem, System
from skipdecode import SkipSchedule

PROMPTS = [[5, 9, 11, 4, 17], [6], [8, 8, 30, 2]]
LENGTHS = [24, 1, 17]


@pytest.fixture
def fast() -> SkipSystem:
    tokenizer = train_tokenizer([Example("0", "some", ("words",))], 300, max_length=64)
    checkpoint = Checkpoint("made", tiny("opt"), tokenizer, "packed")
    return SkipSystem("fast", checkpoint, SkipSchedule(6, 4, 3, horizon=12))


def test_the_lossless_speedup_is_the_median_over_the_second_run_of_each_prompt(
    fast: SkipSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the two texts that have a decode step, by the lengths of their prompts; full depth and lossless in turns.
    clock = iter([5.0, 1.0, 9.0, 1.0, 3.0, 1.0, 4.0, 2.0])
    decoded: list[Any] = []
    decode = System.decode

    def timed(self: System, prompts: Any, most: int, lengths: Any) -> Any:
        found = decode(self, prompts, most, lengths)
        decoded.append((type(self), self.schedule, prompts, found.texts, found.lengths))  # type: ignore[attr-defined]
        return replace(found, decode_seconds=next(clock))

    monkeypatch.setattr(System, "decode", timed)
    assert time_lossless(fast, PROMPTS, LENGTHS, Console(quiet=True)) == 2.5  # of 3 and 2
    assert next(clock, None) is None
    for (slow, depth, one, text, length), (lossless, drafts, same, again, so_long) in zip(
        decoded[::2], decoded[1::2], strict=True
    ):
        assert (slow, depth.min_layers, lossless, drafts) == (SkipSystem, 6, LosslessSystem, fast.schedule)
        assert (one, text, length) == (same, again, so_long), "the same texts"
        assert length == [LENGTHS[PROMPTS.index(one[0])]]


def test_there_is_no_lossless_speedup_without_decode_steps(fast: SkipSystem) -> None:
    assert time_lossless(fast, PROMPTS, [1, 1, 1], Console(quiet=True)) is None
