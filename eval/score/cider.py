"""CIDEr-D (Vedantam, Zitnick, Parikh, CVPR 2015), in the units of coco-caption and the E2E NLG challenge's scorer."""

import math
import unicodedata
from collections import Counter
from collections.abc import Sequence

from eval.score.metric import Metric, Statistics, Texts, mean_of
from eval.score.tokenizers import (
    MOST_LOST,
    Words,
    signature,
    suitable,
    unspaced_obstacle,
    without_punctuation,
    words_by,
)
from eval.score.words import ngrams, penn_words

ORDER = 4  # the longest n-grams, in words
SIGMA = 6.0  # words of difference in length that cost 39 %
SCALE = 10.0

NGram = tuple[str, ...]
Vector = dict[NGram, float]


def cider(predictions: Sequence[str], references: Sequence[Sequence[str]], tokenizer: str | None = None) -> Statistics:
    """CIDEr-D, from 0 to 10: the mean over predictions of their likeness to each of their references.

    N-grams are weighed by how few items have them in a reference, so one item by itself scores 0, and the weights stay
    those of the whole test set when items are resampled. Words are those of Stanford's tokenizer, which coco-caption
    runs in Java, without punctuation: E2E's 5,323 texts (the references, and what TGen wrote) are parted alike. With a
    tokenizer they are its words, likewise without punctuation.
    """
    split = _words(tokenizer)
    tokenized = [[split(text) for text in texts] for texts in references]
    items_with: Counter[NGram] = Counter()
    for texts in tokenized:
        items_with.update({gram for text in texts for gram in _count(text)})
    most = math.log(len(references))

    def weigh(text: Sequence[str]) -> list[Vector]:
        """A vector for each order of n-grams."""
        vectors: list[Vector] = [{} for _ in range(ORDER)]
        for gram, count in _count(text).items():
            vectors[len(gram) - 1][gram] = count * (most - math.log(max(1, items_with[gram])))
        return vectors

    scores = []
    for prediction, texts in zip(predictions, tokenized, strict=True):
        text = split(prediction)
        vectors = weigh(text)
        likeness = [
            sum(map(_likeness, vectors, weigh(reference)))
            / ORDER
            * math.exp(-((len(text) - len(reference)) ** 2) / (2 * SIGMA**2))
            for reference in texts
        ]
        scores.append(sum(likeness) / len(texts))
    return mean_of(scores, scale=SCALE)


def _words(tokenizer: str | None) -> Words:
    if tokenizer is None:
        return penn_words
    split = words_by(tokenizer, penn_words)
    return lambda text: without_punctuation(split(text))


def _describe(texts: Texts) -> str:
    tokens = signature(texts.tokenizer) if texts.tokenizer is not None else "Penn"
    return f"CIDEr-D, n = {ORDER}, sigma = {SIGMA:g}, all references, {tokens} tokens without punctuation"


def _obstacle(texts: Texts) -> str | None:
    if obstacle := unspaced_obstacle(texts.right, texts.tokenizer, "the Penn Treebank's"):
        return obstacle
    if texts.tokenizer is None:
        # A vowel sign or an accent that is a character of its own ends a word of that pattern.
        marks = sum(unicodedata.category(sign)[0] == "M" for text in texts.right if not text.isascii() for sign in text)
        if marks > MOST_LOST * sum(sum(map(str.isalpha, text)) for text in texts.right):
            return (
                "its words, the Penn Treebank's, end at vowel signs and accents that are characters of their own: "
                f"choose the tokenizer {suitable(texts.right)}"
            )
    split = _words(texts.tokenizer)
    items = ({gram for text in several for gram in _count(split(text))} for several in texts.references)
    first = next(items)
    if all(grams == first for grams in items):
        return "it weighs words by how few items have them, and here all items have the same"
    return None


def _count(text: Sequence[str]) -> Counter[NGram]:
    return Counter(gram for n in range(1, ORDER + 1) for gram in ngrams(text, n))


def _likeness(prediction: Vector, reference: Vector) -> float:
    """The cosine of two vectors, no weight of the prediction's counted above the reference's."""
    lengths = [math.sqrt(sum(weight**2 for weight in vector.values())) for vector in (prediction, reference)]
    if not all(lengths):
        return 0.0
    product = sum(
        min(weight, reference[gram]) * reference[gram] for gram, weight in prediction.items() if gram in reference
    )
    return product / (lengths[0] * lengths[1])


CIDER = Metric(
    "cider",
    "CIDEr",
    "Vedantam, Zitnick and Parikh, CVPR 2015",
    lambda texts: cider(texts.predictions, texts.references, texts.tokenizer),
    _describe,
    _obstacle,
    decimals=3,
)
