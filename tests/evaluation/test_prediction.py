"""The predicted speed of lossless decoding: drafts are held against transformers' own passes."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lean_cases import tiny
from rich.console import Console

from eval import prediction
from eval.prediction import drafts_taken, predict_lossless, time_rounds, time_starts
from eval.systems.base import Checkpoint, SkipSystem
from skipdecode import SkipSchedule
from skipdecode.draft_length import MOST_DRAFTS, lossless_speed
from skipdecode.families import decoder_layers

PROMPTS = [[5, 9, 11, 4, 17], [6], [8, 8, 30, 2]]
LENGTHS = [24, 1, 17]


def system(model: Any, schedule: SkipSchedule) -> SkipSystem:
    tokenizer: Any = None  # no text is read or written
    return SkipSystem("fast", Checkpoint("made", model, tokenizer, "packed"), schedule)


@contextmanager
def only(model: Any, layers: Any) -> Iterator[None]:
    """The other layers hand on what they are given."""
    skipped = [layer for n, layer in enumerate(decoder_layers(model)) if n not in layers]
    for layer in skipped:
        layer.forward = lambda hidden, *args, **kwargs: hidden
    yield
    for layer in skipped:
        del layer.forward


@pytest.mark.parametrize("name", ["opt", "gpt2", "llama"])
def test_a_draft_is_taken_where_it_is_full_depths_token_behind_full_depths_keys_and_values(name: str) -> None:
    model, schedule = tiny(name), SkipSchedule(6, 5, 3, horizon=12)
    outcomes = set()
    for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
        made: Any = {"max_new_tokens": length, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        text = model.generate(torch.tensor([prompt]), **made)[0]
        expected = []
        for place in range(length - 1):
            ids = text[None, : len(prompt) + place + 1]
            with torch.no_grad():
                past = model(ids[:, :-1]).past_key_values
                with only(model, schedule.layers_at(place)):
                    draft = model(ids[:, -1:], past_key_values=copy.deepcopy(past)).logits[0, -1].argmax()
            expected.append(bool(draft == text[len(prompt) + place + 1]))
        assert drafts_taken(system(model, schedule), prompt, length) == expected
        outcomes |= set(expected)
    assert outcomes == {True, False}, "else a measure that is always the same would pass"


def test_the_speed_is_that_of_what_was_taken_at_each_place_and_of_what_rounds_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = system(tiny("opt"), SkipSchedule(6, 4, 3, horizon=12))
    rounds = {0: 1.0, 1: 1.2, 2: 1.5, 3: 1.6, 4: 2.0, 6: 2.5, 8: 3.0, MOST_DRAFTS: 4.0}
    monkeypatch.setattr(prediction, "time_rounds", lambda *_: rounds)
    monkeypatch.setattr(prediction, "time_starts", lambda *_: 0.5)
    taken = [drafts_taken(fast, prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    shares = [sum(found) / len(found) for found in ([row[n] for row in taken if n < len(row)] for n in range(23))]
    between = [1.0, 1.2, 1.5, 1.6, 2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5, 3.75, 4.0]
    expected = lossless_speed(shares, between.__getitem__, [23, 16], 0.5)
    assert predict_lossless(fast, PROMPTS, LENGTHS, Console(quiet=True)) == pytest.approx(expected)
    assert predict_lossless(fast, PROMPTS, [1, 1, 1], Console(quiet=True)) is None, "no text has a decode step"


def test_rounds_and_starts_are_timed_with_compiled_kernels_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for native in (True, False):
        if not native:
            for step in ("choose", "draft"):
                monkeypatch.setattr(f"skipdecode.runners.ColumnsRunner.{step}", lambda *_: None)
        fast = system(tiny("opt"), SkipSchedule(6, 4, 3, horizon=12))
        rounds = time_rounds(fast, PROMPTS[0], 5)
        assert rounds[0] == 1
        assert max(rounds) == MOST_DRAFTS
        assert min(rounds.values()) > 0
        assert rounds[MOST_DRAFTS] > rounds[1], "eleven drafts and as many columns more"
        assert -MOST_DRAFTS < time_starts(fast, PROMPTS, rounds) < 100
