"""Random cases of lossless decoding, and the check of their output."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from unittest import mock

from decoding_cases import (
    LAYERS,
    NEAR_TIE_INT8,
    ROUNDED,
    Case,
    cases,
    check,
    decode,
    draw_prompts,
    fresh_model,
    generate,
)
from hypothesis import strategies as st
from transformers import PreTrainedModel

from skipdecode import SkipSchedule
from skipdecode.fastpath.sequences import DraftRule
from skipdecode.generate.draft_policy import AcceptedPlusOne, DraftPolicy, VerifiedRound
from skipdecode.kernels.cpu import kernels

FULL = SkipSchedule.full_depth(LAYERS)


# How much is drafted: so many tokens of each sequence; more of some than of others; or as a policy of the library says.
DRAFTS = [1, 3, 12, "ragged", "accepted plus one", "by cost"]


class FixedDrafts:
    """A draft policy that drafts whatever the cost: the models of tests are random, so that drafting hardly ever pays.

    Args:
        drafts: how many tokens of each sequence; "ragged" for as many as their probabilities say, which differ.
    """

    rests = False
    has_pace = True
    rounds = 3

    def __init__(self, drafts: int | str) -> None:
        self._drafts = drafts

    def rule(self, sequences: int, budgets: Sequence[int]) -> DraftRule:
        if isinstance(self._drafts, int):
            return DraftRule([-1.0] * min(self._drafts, len(budgets)), [1.0], [1.0])
        bounds = [n / 300 for n in range(1, 301)]  # the probabilities of random models are small
        return DraftRule([0.5] * len(budgets), bounds, [float(n % 3 > 0) for n in range(300)])

    def learn(self, verified: VerifiedRound) -> None:
        pass

    def learn_pace(self, sequences: int, steps: int, seconds: float) -> None:
        pass


@contextmanager
def drafting(drafts: int | str) -> Iterator[None]:
    """Draft as one of `DRAFTS` says."""
    if drafts == "by cost":
        yield
        return

    def policy(*_: object) -> DraftPolicy:
        return AcceptedPlusOne() if drafts == "accepted plus one" else FixedDrafts(drafts)

    with mock.patch("skipdecode.generate.skip_generate.CostDraftPolicy", policy):
        yield


@st.composite
def greedy_cases(draw: st.DrawFn) -> Case:
    case = draw(cases())
    lengths = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=8)))
    return replace(
        case,
        lengths=lengths,
        new_tokens=draw(st.integers(1, 16)),
        mask=case.mask or (case.embeds and len(set(lengths)) > 1),
        cache="planned",
        weights=draw(st.sampled_from([None, "model", "packed", *ROUNDED])),
        sampling=None,
        update=None,
        only=None,
        cuda_graphs=False,  # lossless decoding has none
    )


@cache
def _model_of(name: str, *, double: bool) -> PreTrainedModel:
    model = deepcopy(fresh_model(name))
    return model.double() if double else model


def check_lossless(case: Case, drafts: int | str, *, double: bool) -> int:
    """Decode a case and compare every token with full depth; in float64 if `double`.

    Returns how many tokens differ because of a near tie; raises AssertionError for other differences.
    """
    if double:
        case = replace(case, weights=None)
    model, prompts = _model_of(case.model, double=double), draw_prompts(case)
    with drafting(drafts):
        texts = decode(case, model, prompts, lossless=True)
    if case.weights in ROUNDED:
        return _check_rounded(case, model, prompts, texts)
    return check(replace(case, schedule=FULL), model, prompts, texts)


def _check_rounded(case: Case, model: PreTrainedModel, prompts: list[list[int]], texts: list[list[int]]) -> int:
    """Compare with full depth and the same weights: exactly with the kernels, otherwise except for near ties, because a
    pass over several positions rounds differently.
    """
    plain = generate(replace(case, schedule=FULL), model, prompts, return_dict_in_generate=True, output_logits=True)
    start = 0 if case.embeds else max(map(len, prompts))
    ties = 0
    for row, text in enumerate(texts):
        expected = plain.sequences[row, start : start + len(text)].tolist()
        other = next((step for step, (a, b) in enumerate(zip(text, expected, strict=True)) if a != b), None)
        if other is not None:
            assert kernels() is None
            scores = plain.logits[other][row].log_softmax(-1)
            assert float(scores.max() - scores[text[other]]) <= NEAR_TIE_INT8
            ties += 1
    return ties
