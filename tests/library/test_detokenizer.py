"""The text of tokens that come one after another, or several at once."""

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from data import load_task
from data.vocabulary import train_tokenizer

pytest.importorskip("fastapi")  # the package that it is in is that of an extra

from skipdecode.serve.detokenizer import Words
from skipdecode.serve.token_bytes import Spelling

TOKENIZER: Any = train_tokenizer(load_task("departures", train_size=40).stream("train"), 320, 128)


def like_llamas() -> Any:
    """Spaces are a part of words, and the first one's is dropped; characters that it doesn't know are bytes."""
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *"▁thea", "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocabulary = {piece: n for n, piece in enumerate(letters)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    replaced = decoders.Replace("▁", " ")
    made.decoder = decoders.Sequence([replaced, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def like_berts() -> Any:
    """Spaces are no part of words, and stand before all but a first one."""
    vocabulary = {piece: n for n, piece in enumerate(["[UNK]", "<s>", "</s>", "the", "a", "##the", "##a", ".", "'"])}
    made = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="[UNK]")


TOKENIZERS = {"byte-level": TOKENIZER, "like Llama's": like_llamas(), "like BERT's": like_berts()}
# As texts are, and with tokens in the middle that no text shows.
PIECES = st.sampled_from(["the", " the", " ", "é", "€", ".", "<s>", "</s>"]) | st.text(max_size=2)
TEXTS = st.lists(PIECES, min_size=16, max_size=24).map("".join)


def grown(
    tokens: list[int], draw: random.Random, most: int, stops: list[str], tokenizer: Any = TOKENIZER
) -> tuple[str, str, bool]:
    """What a text has grown by, its text, and whether a stop ended it, of tokens that come up to `most` at once."""
    words, parts, at = Words(tokenizer, stops), [], 0
    while at < len(tokens) and not words.stopped:
        count = draw.randint(1, most)
        at += count
        parts.append(words.add(tokens[at - count : at], last=at >= len(tokens)))
    return "".join(parts), words.text, words.stopped


@pytest.mark.parametrize("kind", [*TOKENIZERS, "without the library tokenizers"])
@settings(max_examples=40)
@example("the" + 11 * " the" + "</s> the", 1, random.Random(0))
@given(TEXTS, st.integers(1, 20), st.randoms(use_true_random=False))
def test_however_tokens_come_the_text_is_that_of_all(kind: str, text: str, most: int, draw: random.Random) -> None:
    tokenizer = TOKENIZERS.get(kind) or ByT5Tokenizer()
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert grown(tokens, draw, most, [], tokenizer) == (whole, whole, False)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=40)
@given(TEXTS.map(lambda text: text.replace("\ufffd", "")))  # which looks like a part of a character
def test_the_bytes_of_tokens_are_those_of_the_text_up_to_where_they_stand(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    spelling = Spelling(tokenizer)
    first = spelling.first(tokens)
    raw = [spelling.raw(token, first=place <= first) for place, token in enumerate(tokens)]
    assert b"".join(raw).decode() == whole
    words = Words(tokenizer, [])
    for place, token in enumerate(tokens):
        assert whole[: words.decided] == b"".join(raw[:place]).decode(errors="ignore")
        words.add([token], last=False)


@pytest.mark.parametrize(
    ("kind", "text", "names"),
    [
        ("like Llama's", "the the é</s>", [" the", " the", " ", "bytes:\\xc3", "bytes:\\xa9", "</s>"]),
        ("like BERT's", "the a.</s>", [" the", " a", ".", "</s>"]),
        ("byte-level", "é</s>", ["bytes:\\xc3", "bytes:\\xa9", "</s>"]),
    ],
)
def test_tokens_have_the_names_of_what_they_add(kind: str, text: str, names: list[str]) -> None:
    tokenizer = TOKENIZERS[kind]
    spelling = Spelling(tokenizer)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [spelling.name(token, spelling.raw(token)) for token in tokens] == names


@settings(max_examples=40)
@example(["<0xC3>", "<0xA9>", "<0xC3>", "<0xC3>"], 16, random.Random(0))
@given(
    st.lists(st.sampled_from(["<0x20>", "<0xA9>", "<0xC3>", "<0xE2>", "▁", "▁the", "a", "</s>"]), max_size=40),
    st.integers(2, 20),
    st.randoms(use_true_random=False),
)
def test_however_broken_characters_come_the_text_is_the_same(pieces: list[str], most: int, draw: random.Random) -> None:
    tokenizer = TOKENIZERS["like Llama's"]
    tokens = tokenizer.convert_tokens_to_ids(pieces)
    assert grown(tokens, draw, most, [], tokenizer) == grown(tokens, draw, 1, [], tokenizer)


@given(
    st.text(alphabet="abé ", min_size=1, max_size=40), st.text(alphabet="abé ", min_size=1, max_size=3), st.randoms()
)
def test_a_stop_ends_the_text_before_it(text: str, stop: str, draw: random.Random) -> None:
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    before, found, _ = text.partition(stop)
    assert grown(tokens, draw, 1, ["never", stop]) == (before, before, bool(found))
