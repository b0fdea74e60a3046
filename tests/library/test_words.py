"""The text of tokens that come one after another, or several at once."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import load_task
from data.vocabulary import train_tokenizer

pytest.importorskip("fastapi")  # the package that it is in is that of an extra

from skipdecode.serve.words import Words

TOKENIZER: Any = train_tokenizer(load_task("departures", train_size=40).stream("train"), 320, 128)


def grown(tokens: list[int], draw: random.Random, most: int, stops: list[str]) -> tuple[str, str, bool]:
    """What a text has grown by, its text, and whether a stop ended it, of tokens that come up to `most` at once."""
    words, parts, at = Words(TOKENIZER, stops), [], 0
    while at < len(tokens) and not words.stopped:
        count = draw.randint(1, most)
        at += count
        parts.append(words.add(tokens[at - count : at], last=at >= len(tokens)))
    return "".join(parts), words.text, words.stopped


@given(
    st.text(max_size=40).map(lambda text: TOKENIZER(text, add_special_tokens=False)["input_ids"]),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_however_tokens_come_the_text_is_that_of_all(tokens: list[int], most: int, draw: random.Random) -> None:
    whole = TOKENIZER.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert grown(tokens, draw, most, []) == (whole, whole, False)


@given(
    st.text(alphabet="abé ", min_size=1, max_size=40), st.text(alphabet="abé ", min_size=1, max_size=3), st.randoms()
)
def test_a_stop_ends_the_text_before_it(text: str, stop: str, draw: random.Random) -> None:
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    before, found, _ = text.partition(stop)
    assert grown(tokens, draw, 1, ["never", stop]) == (before, before, bool(found))
