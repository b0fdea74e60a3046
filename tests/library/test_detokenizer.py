"""Incremental detokenization: the text doesn't depend on how many tokens come at once."""

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from data import load_task
from data.vocabulary import train_tokenizer

pytest.importorskip("fastapi")  # skipdecode.serve needs the extra

from skipdecode.serve.detokenizer import Detokenizer
from skipdecode.serve.token_bytes import TokenBytes

TOKENIZER: Any = train_tokenizer(load_task("departures", train_size=40).stream("train"), 320, 128)


def llama_like() -> Any:
    """Like Llama's: a space belongs to the word after it, is dropped before a first word, and bytes are a fallback."""
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *"▁thea", "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocabulary = {piece: n for n, piece in enumerate(letters)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    replaced = decoders.Replace("▁", " ")
    made.decoder = decoders.Sequence([replaced, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def bert_like() -> Any:
    """Like BERT's: spaces belong to no word, and are inserted before all but the first."""
    vocabulary = {piece: n for n, piece in enumerate(["[UNK]", "<s>", "</s>", "the", "a", "##the", "##a", ".", "'"])}
    made = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="[UNK]")


TOKENIZERS = {"byte-level": TOKENIZER, "like Llama's": llama_like(), "like BERT's": bert_like()}
# Texts, also with special tokens in the middle.
PIECES = st.sampled_from(["the", " the", " ", "é", "€", ".", "<s>", "</s>"]) | st.text(max_size=2)
TEXTS = st.lists(PIECES, min_size=16, max_size=24).map("".join)


def detokenized(
    tokens: list[int], draw: random.Random, maximum: int, stops: list[str], tokenizer: Any = TOKENIZER
) -> tuple[str, str, bool]:
    """Add up to `maximum` tokens at a time. Returns the joined new text, the final text, and whether it was stopped."""
    detokenizer, parts, at = Detokenizer(tokenizer, stops), [], 0
    while at < len(tokens) and not detokenizer.stopped:
        count = draw.randint(1, maximum)
        at += count
        parts.append(detokenizer.add(tokens[at - count : at], last=at >= len(tokens)))
    return "".join(parts), detokenizer.text, detokenizer.stopped


@pytest.mark.parametrize("kind", [*TOKENIZERS, "without the library tokenizers"])
@settings(max_examples=40)
@example("the" + 11 * " the" + "</s> the", 1, random.Random(0))
@given(TEXTS, st.integers(1, 20), st.randoms(use_true_random=False))
def test_the_text_is_that_of_all_tokens_decoded_together(
    kind: str, text: str, maximum: int, draw: random.Random
) -> None:
    tokenizer = TOKENIZERS.get(kind) or ByT5Tokenizer()
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert detokenized(tokens, draw, maximum, [], tokenizer) == (whole, whole, False)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=40)
@given(TEXTS.map(lambda text: text.replace("\ufffd", "")))  # stands for part of a character
def test_the_bytes_of_the_tokens_before_each_offset_are_the_text_up_to_it(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    token_bytes = TokenBytes(tokenizer)
    first = token_bytes.first(tokens)
    raw = [token_bytes.added(token, first=place <= first) for place, token in enumerate(tokens)]
    assert b"".join(raw).decode() == whole
    detokenizer = Detokenizer(tokenizer, [])
    for place, token in enumerate(tokens):
        assert whole[: detokenizer.decoded_length] == b"".join(raw[:place]).decode(errors="ignore")
        detokenizer.add([token], last=False)


@pytest.mark.parametrize(
    ("kind", "text", "names"),
    [
        ("like Llama's", "the the é</s>", [" the", " the", " ", "bytes:\\xc3", "bytes:\\xa9", "</s>"]),
        ("like BERT's", "the a.</s>", [" the", " a", ".", "</s>"]),
        ("byte-level", "é</s>", ["bytes:\\xc3", "bytes:\\xa9", "</s>"]),
    ],
)
def test_tokens_are_named_by_the_characters_or_bytes_that_they_add(kind: str, text: str, names: list[str]) -> None:
    tokenizer = TOKENIZERS[kind]
    token_bytes = TokenBytes(tokenizer)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [token_bytes.name(token, token_bytes.added(token)) for token in tokens] == names


@settings(max_examples=40)
@example(["<0xC3>", "<0xA9>", "<0xC3>", "<0xC3>"], 16, random.Random(0))
@given(
    st.lists(st.sampled_from(["<0x20>", "<0xA9>", "<0xC3>", "<0xE2>", "▁", "▁the", "a", "</s>"]), max_size=40),
    st.integers(2, 20),
    st.randoms(use_true_random=False),
)
def test_invalid_bytes_give_the_same_text_however_many_tokens_come_at_once(
    pieces: list[str], maximum: int, draw: random.Random
) -> None:
    tokenizer = TOKENIZERS["like Llama's"]
    tokens = tokenizer.convert_tokens_to_ids(pieces)
    assert detokenized(tokens, draw, maximum, [], tokenizer) == detokenized(tokens, draw, 1, [], tokenizer)


@given(
    st.text(alphabet="abé ", min_size=1, max_size=40), st.text(alphabet="abé ", min_size=1, max_size=3), st.randoms()
)
def test_the_text_ends_before_a_stop(text: str, stop: str, draw: random.Random) -> None:
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    before, found, _ = text.partition(stop)
    assert detokenized(tokens, draw, 1, ["never", stop]) == (before, before, bool(found))
