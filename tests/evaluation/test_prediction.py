"""The predicted speed of lossless decoding: drafts are held against transformers' own passes."""

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lean_cases import tiny
from rich.console import Console

from eval import prediction
from eval.prediction import CHAIN, Draft, play_texts, predict_lossless, record_drafts, time_rounds, time_starts
from eval.systems.base import Checkpoint, SkipSystem
from skipdecode import SkipSchedule
from skipdecode.cost import interpolated
from skipdecode.draft_length import MOST_DRAFTS, DraftLength, DraftRecord
from skipdecode.families import decoder_layers
from skipdecode.lean import lean_decoder

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
def test_a_draft_agrees_where_it_is_full_depths_token_behind_full_depths_keys_and_values_and_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "draft_decoder", lambda model, decoder, layers: decoder)  # not int8
    model, schedule = tiny(name), SkipSchedule(6, 5, 3, horizon=12)
    outcomes = set()
    for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
        made: Any = {"max_new_tokens": length, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        text = model.generate(torch.tensor([prompt]), **made)
        expected: dict[int, list[Draft]] = {3: [], 5: []}
        for layers, drafts in expected.items():
            for start in range(len(prompt), len(prompt) + length - 1, CHAIN):
                end = min(start + CHAIN, text.shape[1] - 1)
                with torch.no_grad():
                    past = model(text[:, :start]).past_key_values
                    with only(model, schedule.layers_for(layers)):
                        logits = model(text[:, start:end], past_key_values=past).logits[0]
                probabilities, chosen = torch.softmax(logits, dim=-1).max(dim=-1)
                agrees = chosen == text[0, start + 1 : end + 1]
                drafts += [Draft(*each) for each in zip(probabilities.tolist(), agrees.tolist(), strict=True)]
        found = record_drafts(system(model, schedule), prompt, length, [3, 5])
        for layers, drafts in expected.items():
            assert [draft.agrees for draft in found[layers]] == [draft.agrees for draft in drafts]
            probabilities = [draft.probability for draft in drafts]
            assert [draft.probability for draft in found[layers]] == pytest.approx(probabilities, rel=1e-4)
            outcomes |= {draft.agrees for draft in drafts}
    assert outcomes == {True, False}, "else a measure that is always the same would pass"


TIMED = {
    layers: {drafts: 1 + drafts * (layers / 20 + 0.04) for drafts in (0, 1, 2, 4, MOST_DRAFTS)} for layers in (3, 5)
}


def new_length() -> DraftLength:
    """Whose costs are those of `TIMED`."""
    return DraftLength(
        DraftRecord(), lambda layers, tokens: layers / 6 * (0.96 + 0.04 * tokens), 6, lambda layers, _: layers / 20
    )


def random_texts(agrees: Sequence[float], lengths: Sequence[int], seed: int) -> list[dict[int, list[Draft]]]:
    """Drafts that are taken as likely as given, by 3 layers and by 5."""
    draw = random.Random(seed)
    return [
        {
            layers: [Draft(draw.random(), draw.random() < share) for _ in range(length)]
            for layers, share in zip((3, 5), agrees, strict=True)
        }
        for length in lengths
    ]


@settings(max_examples=20)
@given(
    agrees=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    many_rounds=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_known_text_is_never_decoded_faster_than_by_whom_knows_it_nor_much_slower_than_at_full_depth(
    agrees: tuple[float, float], lengths: list[int], many_rounds: bool, seed: int
) -> None:
    texts = random_texts(agrees, lengths, seed)

    def best(text: Mapping[int, Sequence[Draft]]) -> float:
        """Steps with the best number of drafts at every place, by as many layers as is best for that round."""
        count = len(text[3])
        left = [0.0] * (count + 1)
        for place in reversed(range(count)):
            found = []
            for layers in text:
                for drafts in range(min(MOST_DRAFTS, count - place) + 1):
                    drafted = text[layers][place : place + drafts]
                    same = next((n for n, draft in enumerate(drafted) if not draft.agrees), drafts)
                    found.append(interpolated(TIMED[layers], drafts) + left[min(count, place + same + 1)])
            left[place] = min(found)
        return left[0]

    schedule = SkipSchedule(6, 5, 3, horizon=12)
    speeds = play_texts(texts, schedule, new_length(), TIMED, many_rounds=many_rounds)
    steps = [tokens / speed for tokens, speed in zip(lengths, speeds, strict=True)]
    assert all(taken >= best(text) - 1e-9 for taken, text in zip(steps, texts, strict=True))
    assert sum(steps) <= sum(lengths) + 30, "it may lose a little before it has seen what drafts do"
    delayed = play_texts(texts, schedule, new_length(), TIMED, 0.5, many_rounds=many_rounds)
    assert delayed == pytest.approx([tokens / (taken + 0.5) for tokens, taken in zip(lengths, steps, strict=True)])


@pytest.mark.parametrize("taken", [0.5, 0.8, 0.95])
def test_of_long_texts_it_is_the_speed_of_the_formula(taken: float) -> None:
    """Leviathan et al. 2023, theorem 3.8: (1 - a^(g + 1)) / (1 - a) / (g c + V(g + 1))."""
    texts = random_texts((taken, taken), [400] * 5, seed=0)
    expected = max((1 - taken ** (g + 1)) / (1 - taken) / interpolated(TIMED[3], g) for g in range(MOST_DRAFTS + 1))
    found = play_texts(texts, SkipSchedule(6, 3, 3, horizon=12), new_length(), TIMED, many_rounds=True)
    assert statistics.fmean(found) == pytest.approx(expected, rel=0.1)


def test_the_speed_is_that_of_the_drafts_and_of_what_rounds_took(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = SkipSchedule(6, 5, 3, horizon=12)
    fast = system(tiny("opt"), schedule)
    monkeypatch.setattr(prediction, "time_rounds", lambda *given: TIMED[given[-1]])
    monkeypatch.setattr(prediction, "time_starts", lambda *_: 0.5)
    monkeypatch.setattr(
        prediction, "lossless_costs", lambda *_: (lambda layers, tokens: 1.0, lambda layers, tokens: 0.1)
    )
    texts = [record_drafts(fast, PROMPTS[n], LENGTHS[n], [3, 4, 5]) for n in (2, 0)]  # by length
    length = DraftLength(DraftRecord(), lambda layers, tokens: 1.0, 6, lambda layers, tokens: 0.1)
    many = lean_decoder(fast.checkpoint.model, "packed").choosing(1) is not None
    expected = statistics.median(play_texts(texts, schedule, length, TIMED, 0.5, many_rounds=many))
    assert predict_lossless(fast, PROMPTS, LENGTHS, Console(quiet=True)) == pytest.approx(expected)
    assert predict_lossless(fast, PROMPTS, [1, 1, 1], Console(quiet=True)) is None, "no text has a decode step"


def test_rounds_and_starts_are_timed_with_compiled_kernels_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for native in (True, False):
        if not native:
            for step in ("choose", "draft"):
                monkeypatch.setattr(f"skipdecode.runners.ColumnsRunner.{step}", lambda *_: None)
        fast = system(tiny("opt"), SkipSchedule(6, 4, 3, horizon=12))
        rounds = time_rounds(fast, PROMPTS[0], 5, 3)
        assert rounds[0] == 1
        assert max(rounds) == MOST_DRAFTS
        assert min(rounds.values()) > 0
        assert rounds[MOST_DRAFTS] > rounds[1], "eleven drafts and as many columns more"
        assert -MOST_DRAFTS < time_starts(fast, PROMPTS, {3: rounds, 4: rounds}) < 100
