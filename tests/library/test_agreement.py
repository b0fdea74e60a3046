"""Agreement: tokens that transformers' own decoding would have chosen behind the same text."""

import math
from collections.abc import Sequence
from itertools import product
from operator import mul

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lean_cases import tiny

from skipdecode import SkipSchedule, skip_generate
from skipdecode.agreement import agreeing_tokens
from skipdecode.draft_length import MOST_DRAFTS, lossless_speed

PROMPTS = [[5, 9, 11, 4, 17], [6], [8, 8, 30]]


def next_token(model, ids: list[int]) -> int:
    inputs = torch.tensor([ids])
    made = {"max_new_tokens": 1, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(inputs)}
    return int(model.generate(inputs, **made)[0, -1])


@pytest.mark.parametrize("name", ["opt", "gpt2", "llama"])
def test_a_token_agrees_where_transformers_would_choose_it_next(name: str) -> None:
    model = tiny(name)
    schedule = SkipSchedule(6, 3, 1, horizon=6)
    texts: list[list[int]] = [[]]
    for prompt in PROMPTS[1:]:
        made = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        output = model.generate(torch.tensor([prompt]), custom_generate=skip_generate, schedule=schedule, **made)
        texts.append(output[0, len(prompt) :].tolist())
    found = agreeing_tokens(model, PROMPTS, texts)
    assert found == [
        [next_token(model, [*prompt, *text[:n]]) == token for n, token in enumerate(text)]
        for prompt, text in zip(PROMPTS, texts, strict=True)
    ]
    assert len({agrees for row in found for agrees in row}) == 2, "else a measure that is always the same would pass"


@given(taken=st.floats(0, 0.98), draft=st.floats(0.05, 1.5), column=st.floats(0, 0.5))
def test_the_predicted_speed_of_a_text_without_an_end_is_that_of_the_formula(
    taken: float, draft: float, column: float
) -> None:
    """Tokens a round, and its cost, counted from the outcomes of a round one by one."""

    def speed(drafts: int) -> float:
        tokens = sum((n + 1) * taken**n * (1 - taken) for n in range(drafts)) + (drafts + 1) * taken**drafts
        return tokens / (drafts * draft + 1 + column * drafts)

    expected = max(speed(drafts) for drafts in range(MOST_DRAFTS + 1))
    found = lossless_speed([taken], lambda drafts: drafts * draft + 1 + column * drafts, [4000])
    assert found == pytest.approx(expected, rel=0.01)
    assert found >= 1


@settings(max_examples=30)
@given(
    taken=st.lists(st.floats(0, 1), min_size=1, max_size=5),
    draft=st.floats(0.01, 1.5),
    column=st.floats(0, 0.5),
    tokens=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_the_predicted_speed_of_a_text_is_the_best_that_any_choice_of_drafts_gives_it(
    taken: list[float], draft: float, column: float, tokens: list[int]
) -> None:
    """Every number of drafts at every place, over every way in which a text's places agree or don't."""
    share = [*taken, *[taken[-1]] * 5]

    def steps(drafts: Sequence[int], agrees: Sequence[bool]) -> float:
        place, cost = 0, 0.0
        while place < len(agrees):
            count = min(drafts[place], len(agrees) - place - 1)
            cost += count * draft + 1 + column * count
            same = next((n for n in range(count) if not agrees[place + n]), count)
            place += same + 1
        return cost

    def expected(end: int) -> float:
        ways = list(product([True, False], repeat=end))
        chances = [math.prod(share[n] if same else 1 - share[n] for n, same in enumerate(way)) for way in ways]
        plans = product(*(range(end - place) for place in range(end)))
        return min(sum(map(mul, chances, (steps(plan, way) for way in ways))) for plan in plans)

    found = lossless_speed(taken, lambda drafts: drafts * draft + 1 + column * drafts, tokens)
    assert found == pytest.approx(sum(tokens) / sum(map(expected, tokens)))
