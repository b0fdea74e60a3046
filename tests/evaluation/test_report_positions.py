"""Quality by position, compared with the counts of BLEU."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU

import eval.report.positions
from eval.report.positions import MAX_BINS, bin_width, by_position, matched_ngrams
from eval.score.words import words

WORDS = st.lists(st.sampled_from(["the", "The", "cat", "sat", "mat.", "3,000", "don't", "-"]), min_size=1, max_size=14)
TEXTS = st.lists(st.tuples(WORDS, st.lists(WORDS, min_size=1, max_size=3)), min_size=1, max_size=6)


@given(TEXTS)
def test_counts_summed_over_all_positions_equal_those_of_bleu(texts: list[tuple[list[str], list[list[str]]]]) -> None:
    predictions = [" ".join(written) for written, _ in texts]
    references = [[" ".join(written) for written in several] for _, several in texts]
    streams = [[r[n] if n < len(r) else None for r in references] for n in range(3)]
    bleu = BLEU(lowercase=True, tokenize="13a").corpus_score(predictions, streams)  # type: ignore[arg-type]
    for n in (1, 2):
        matched = [
            flag
            for prediction, several in zip(predictions, references, strict=True)
            for flag in matched_ngrams(words(prediction), [words(text) for text in several], n)
        ]
        assert (sum(matched), len(matched)) == (bleu.counts[n - 1], bleu.totals[n - 1])


@given(TEXTS, st.sampled_from([1, 2]), st.integers(1, 6))
def test_every_ngram_is_in_one_bin(texts: list[tuple[list[str], list[list[str]]]], n: int, width: int) -> None:
    predictions, references = [prediction for prediction, _ in texts], [several for _, several in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eval.report.positions, "MIN_NGRAMS", 1)
        patch.setattr(eval.report.positions, "RESAMPLES", 100)
        bins = by_position(predictions, references, n, width)
    flags = [matched_ngrams(p, r, n) for p, r in zip(predictions, references, strict=True)]
    for part in bins:
        assert part.last - part.first + 1 == width
        # Naive computation: the n-grams whose last word, counted from 1, is in the bin.
        within = [matched for row in flags for at, matched in enumerate(row) if part.first <= at + n <= part.last]
        assert part.ngrams == len(within)
        assert part.share == pytest.approx(100 * sum(within) / len(within))
    assert sum(part.ngrams for part in bins) == sum(map(len, flags))


def test_wrong_tokens_show_at_their_positions() -> None:
    reference = tuple("abcdefghijklmno")
    bins = by_position([(*reference[:10], "x", "x", "x", "x", "x")] * 30, [[reference]] * 30, 1, 5)
    assert [(part.first, part.last, part.share) for part in bins] == [(1, 5, 100.0), (6, 10, 100.0), (11, 15, 0.0)]
    assert [part.interval for part in bins] == [(100.0, 100.0), (100.0, 100.0), (0.0, 0.0)]  # all texts are equal


def test_the_width_of_the_interval_agrees_with_theory() -> None:
    texts, share = 400, 0.3
    predictions = [("a",) if n < texts * share else ("x",) for n in range(texts)]
    (part,) = by_position(predictions, [[("a",)]] * texts, 1, 5)
    error = 100 * math.sqrt(share * (1 - share) / texts)
    low, high = part.interval
    assert low == pytest.approx(30 - 1.96 * error, abs=0.15 * error * 1.96)
    assert high == pytest.approx(30 + 1.96 * error, abs=0.15 * error * 1.96)


def test_positions_with_few_ngrams_are_left_out_and_a_single_word_has_no_pair() -> None:
    predictions = [("a", "b", "c", "d", "e", "f")] * 19 + [("a",)] * 30
    references = [[("a",)]] * 49
    assert [part.first for part in by_position(predictions, references, 1, 5)] == [1]
    assert by_position([("a",)] * 30, [[("a",)]] * 30, 2, 5) == []


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=50))
def test_bins_are_as_narrow_as_their_maximum_number_allows(lengths: list[int]) -> None:
    width = bin_width(lengths)
    most = sorted(lengths)[min(len(lengths) - 1, len(lengths) * 19 // 20)]
    assert width * MAX_BINS >= most
    assert width == 5 or width // 2 * MAX_BINS < most
