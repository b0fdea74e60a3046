"""NIST and CIDEr-D: fixed cases computed by hand, and equality with other implementations."""

import csv
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nltk.translate.nist_score import corpus_nist

from data.e2e import E2E, parse_mr
from eval.score.bleu import bleu
from eval.score.cider import cider
from eval.score.nist import nist
from eval.score.words import penn_words, words

WORD = st.sampled_from(["a", "b", "c", "d", "e", "f"])
TEXT = st.lists(WORD, min_size=6, max_size=12).map(" ".join)


def test_nist_of_a_fixed_case_equals_the_definition() -> None:
    # By hand, Doddington 2002, as mteval-v13a. References "a b c" and "a b": 5 words, 2 of them a, 2 b, 1 c; 2 pairs
    # "a b". Of the prediction's 3 words "a" and "b" match, each worth log2(5 / 2); of its 2 pairs "a b", worth nothing.
    # It is longer than the references' mean of 2.5 words: no penalty.
    assert nist(["A b d"], [["a b c", "a b"]]).value == pytest.approx(2 * math.log2(5 / 2) / 3)
    # One word of two and a half: log2(5 / 2), times exp(beta * ln(1 / 2.5) ** 2), beta = ln(0.5) / ln(1.5) ** 2.
    penalty = math.exp(math.log(0.5) / math.log(1.5) ** 2 * math.log(1 / 2.5) ** 2)
    assert nist(["b"], [["a b c", "a b"]]).value == pytest.approx(math.log2(5 / 2) * penalty)


def test_ngram_matches_are_clipped_to_the_maximum_count_in_a_reference() -> None:
    # "a" twice: in no reference more than once, be it in both. 4 words in the references, 2 of them "a".
    assert nist(["a a"], [["a b", "a c"]]).value == pytest.approx(math.log2(4 / 2) / 2)
    # Words match in different references, where nltk takes the one reference with the best score.
    assert nist(["b c"], [["a b", "a c"]]).value == pytest.approx(2 * math.log2(4 / 1) / 2)


def test_nist_halves_the_score_at_two_thirds_of_the_words() -> None:
    text = "a b c d e f"
    assert nist(["a b c d"], [[text]]).value == pytest.approx(math.log2(6) / 2)
    assert nist([text], [[text]]).value == pytest.approx(math.log2(6))


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5))
def test_nist_with_one_reference_equals_nltk(pairs: list[tuple[str, str]]) -> None:
    predictions, references = [prediction for prediction, _ in pairs], [[reference] for _, reference in pairs]
    expected = corpus_nist([[texts[0].split()] for texts in references], [text.split() for text in predictions], n=5)
    assert nist(predictions, references).value == pytest.approx(expected)


def test_words_equal_mteval() -> None:
    assert words("It's £20-25, at 1.5 km; near Café Rouge.") == (
        ["it's", "£20", "-", "25", ",", "at", "1.5", "km", ";", "near", "café", "rouge", "."]
    )


def test_nist_compares_lengths_with_the_mean_of_all_references_as_in_mteval() -> None:
    # An item with three references of two words and one with a reference of six: 12 words in 4, so 3 words an item,
    # where the mean of each item's own would be 4. Texts of two words have two thirds of that.
    references = [["a b", "a c", "a d"], ["e f g h i j"]]
    whole = nist(["a b x", "e f x"], references)  # as long as that: no penalty
    information = math.log2(12 / 3) + math.log2(12) * 3, math.log2(3) + 0
    assert whole.value == pytest.approx(information[0] / 6 + information[1] / 4)
    short = nist(["a b", "e f"], references)
    assert short.value == pytest.approx((information[0] / 4 + information[1] / 2) / 2)


def test_penn_words_equal_the_stanford_tokenizer() -> None:
    # As edu.stanford.nlp.process.PTBTokenizer 3.4.1 -lowerCase parts it, without the punctuation that pycocoevalcap
    # lists; signs of money, all of which it writes as one, stay.
    parted = {
        "Isn't a café at £20-25, it's \"Raja's\" (5-star).": "is n't a café at £ 20-25 it 's raja 's 5-star",
        "Non-family; we can't say: 1.50 or 20£-25 etc., no.": "non-family we ca n't say 1.50 or 20 £ -25 etc. no",
        "You cannot; she’ll have hors d'oeuvres": "you can not she 'll have hors d'oeuvres",
    }
    for text, expected in parted.items():
        assert penn_words(text) == expected.split()


def test_the_published_scores_of_tgen_are_reproduced(shared_data: Path) -> None:
    with (shared_data / "systems" / "e2e-tgen.tsv").open(encoding="utf-8", newline="") as file:
        texts = dict(list(csv.reader(file, delimiter="\t"))[1:])
    test = E2E(str(shared_data / "e2e")).load("test")
    by_slots = {tuple(parse_mr(meaning).items()): text for meaning, text in texts.items()}
    predictions = [by_slots[tuple(parse_mr(example.meaning).items())] for example in test]
    references = [example.references for example in test]
    # Dušek, Novikova, Rieser, "Evaluating the State-of-the-Art of End-to-End NLG", 2020: the baseline's row.
    assert round(bleu(predictions, references).value, 2) == 65.93
    assert round(nist(predictions, references).value, 4) == 8.6094
    assert round(cider(predictions, references).value, 4) == 2.2338


def test_cider_of_a_fixed_case_equals_the_definition() -> None:
    # By hand, Vedantam et al. 2015, two items: an n-gram of one of them, or of none, weighs ln 2, one of both 0.
    # Words of the first: "b" and "x" against "b" and "c", "a" weighing nothing: a cosine of 1 / (sqrt 2 * sqrt 2).
    # Pairs: "a b", "b x" against "a b", "b c": 1 / 2. Threes: nothing in common; fours: none. The mean of the four.
    statistics = cider(["a b x", "a d e"], [["a b c"], ["a d e"]])
    first = 10 * (1 / 2 + 1 / 2) / 4
    assert statistics.items[0, 0] == pytest.approx(first)
    assert statistics.items[1, 0] == pytest.approx(10 * 3 / 4)  # the same text, which has no fours
    assert statistics.value == pytest.approx((first + 7.5) / 2)


def test_cider_penalizes_repetition_and_length() -> None:
    references = [["a b c d e"], ["f g h i j"]]
    whole, doubled = cider(["a b c d e", "x"], references), cider(["a b c d e a b c d e", "x"], references)
    assert whole.items[0, 0] == pytest.approx(10)
    # Clipped, so that a word said twice is worth no more, and 5 words too long: a factor of exp(-25 / 72).
    assert doubled.items[0, 0] < 10 * math.exp(-25 / 72)


def test_cider_equals_coco_caption() -> None:
    # Values of pycocoevalcap 1.2's Cider().compute_score on the same words, joined by blanks.
    rng = random.Random(0)
    vocabulary = ["a", "cheap", "pub", "near", "the", "river", "serves", "food", "for", "kids", "and", "has", "good"]
    references = [[" ".join(rng.choices(vocabulary, k=rng.randint(5, 12))) for _ in range(3)] for _ in range(6)]
    predictions = [" ".join(texts[0].split()[:4] + texts[1].split()[3:]) for texts in references]
    expected = [3.2216360540, 3.4611735464, 2.9347803117, 3.6513040386, 1.6987151458, 2.7072756971]
    statistics = cider(predictions, references)
    assert statistics.items[:, 0] == pytest.approx(expected)
    assert statistics.value == pytest.approx(2.9458141323)
