"""`Endings` ends sequences exactly where the stopping criteria do when they are called at each position."""

from typing import Any
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList

from skipdecode.generate.stopping import Endings, RowLengths
from skipdecode.timing.step_clock import StepClock

PROMPT = 2


@st.composite
def criteria(draw: st.DrawFn, batch: int) -> StoppingCriteriaList:
    found: list[StoppingCriteria] = []
    for kind in draw(st.lists(st.sampled_from(["length", "length", "tokens", "rows"]), min_size=1, max_size=4)):
        if kind == "length":
            found.append(MaxLengthCriteria(PROMPT + draw(st.integers(1, 9)), draw(st.none() | st.integers(3, 12))))
        elif kind == "tokens":
            ends = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
            found.append(EosTokenCriteria(torch.tensor(ends)))
        else:
            lengths = draw(st.lists(st.integers(1, 9), min_size=batch, max_size=batch))
            found.append(RowLengths(lengths, PROMPT, 0, torch.device("cpu")))
    return StoppingCriteriaList(found)


@settings(max_examples=200, derandomize=True, database=None)
@given(st.data())
def test_several_positions_at_once_end_the_sequences_that_criteria_end_one_by_one(data: st.DataObject) -> None:
    batch, positions = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    given_criteria: Any = data.draw(criteria(batch))
    ids: Any = torch.tensor(
        data.draw(st.lists(st.lists(st.integers(0, 9), min_size=11, max_size=11), min_size=batch, max_size=batch))
    )
    ends, clock = Endings(given_criteria, batch), StepClock(torch.device("cpu"))
    assert ends.known
    watched = Endings(StoppingCriteriaList([*given_criteria, clock]), batch)
    at = PROMPT
    while at < PROMPT + positions:
        new = data.draw(st.integers(1, PROMPT + positions - at))
        expected = [False] * batch
        for length in range(at + 1, at + new + 1):
            ended = given_criteria(ids[:, :length], None).tolist()
            expected = [before or now for before, now in zip(expected, ended, strict=True)]
        at += new
        for each in (ends, watched):
            assert each(ids[:, :at], None, new) == expected
    assert len(clock.step_seconds) == clock.steps
    for row in range(batch):  # with a token that ends nothing
        grown: Any = torch.full((batch, PROMPT), 9)
        while not given_criteria(grown, None)[row] and grown.shape[1] < 20:
            grown = torch.cat([grown, grown[:, :1]], dim=1)
        assert min(ends.room(row, PROMPT), 18) == grown.shape[1] - PROMPT


def test_a_criterion_of_an_unknown_kind_is_called_at_every_position() -> None:
    for other in (MaxTimeCriteria(1e9), type("Own", (MaxLengthCriteria,), {})(5)):
        ends = Endings(StoppingCriteriaList([EosTokenCriteria(torch.tensor([3])), other]), 2)
        assert not ends.known
        assert ends.tokens == {3}
        assert ends(torch.tensor([[1, 3], [1, 2]]), None) == [True, False]


def test_a_sequence_longer_than_the_models_positions_gives_transformers_warning_once() -> None:
    ends = Endings(StoppingCriteriaList([MaxLengthCriteria(9, max_position_embeddings=4)]), 1)
    with mock.patch("transformers.generation.stopping_criteria.logger.warning_once") as warning:
        assert ends(torch.zeros(1, 3, dtype=torch.long), None) == [False]
        assert not warning.called
        assert ends(torch.zeros(1, 5, dtype=torch.long), None, 2) == [False]
        assert warning.call_count == 1
        assert ends(torch.zeros(1, 9, dtype=torch.long), None, 4) == [True]
