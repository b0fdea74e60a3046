"""CIDEr-D (Vedantam, Zitnick, Parikh, CVPR 2015), scaled as in coco-caption and the scorer of the E2E NLG challenge."""

import math
import unicodedata
from collections import Counter
from collections.abc import Sequence

from eval.score.metric import Metric, Statistics, Texts, mean_of
from eval.score.tokenizers import (
    MAX_LOST,
    Words,
    signature,
    suitable,
    unspaced_obstacle,
    without_punctuation,
    words_by,
)
from eval.score.words import ngrams, penn_words

ORDER = 4  # the longest n-grams, in words
SIGMA = 6.0  # a length difference of this many words costs 39 %
SCALE = 10.0

NGram = tuple[str, ...]
Vector = dict[NGram, float]


def cider(predictions: Sequence[str], references: Sequence[Sequence[str]], tokenizer: str | None = None) -> Statistics:
    """CIDEr-D, from 0 to 10: the mean similarity of predictions to each of their references.

    N-grams are weighted by inverse document frequency over the references of items, so a single item scores 0;
    resampling uses the weights of the whole test set. Tokens follow the Stanford tokenizer of
    coco-caption (in Java) without punctuation: on the 5,323 texts of E2E (references and outputs of TGen) they are
    equal. A tokenizer replaces them, also without punctuation.
    """
    split = _words(tokenizer)
    tokenized = [[split(text) for text in texts] for texts in references]
    items_with: Counter[NGram] = Counter()
    for texts in tokenized:
        items_with.update({gram for text in texts for gram in _count(text)})
    max_idf = math.log(len(references))

    def weigh(text: Sequence[str]) -> list[Vector]:
        """The tf-idf vector of each n-gram order."""
        vectors: list[Vector] = [{} for _ in range(ORDER)]
        for gram, count in _count(text).items():
            vectors[len(gram) - 1][gram] = count * (max_idf - math.log(max(1, items_with[gram])))
        return vectors

    scores = []
    for prediction, texts in zip(predictions, tokenized, strict=True):
        text = split(prediction)
        vectors = weigh(text)
        similarities = [
            sum(map(_similarity, vectors, weigh(reference)))
            / ORDER
            * math.exp(-((len(text) - len(reference)) ** 2) / (2 * SIGMA**2))
            for reference in texts
        ]
        scores.append(sum(similarities) / len(texts))
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
    if obstacle := unspaced_obstacle(texts.expected, texts.tokenizer, "the Penn Treebank's"):
        return obstacle
    if texts.tokenizer is None:
        # The pattern ends words at combining vowel signs and accents.
        marks = sum(
            unicodedata.category(sign)[0] == "M" for text in texts.expected if not text.isascii() for sign in text
        )
        if marks > MAX_LOST * sum(sum(map(str.isalpha, text)) for text in texts.expected):
            return (
                "its Penn Treebank tokens end at combining vowel signs and accents: "
                f"choose the tokenizer {suitable(texts.expected)}"
            )
    split = _words(texts.tokenizer)
    items = ({gram for text in several for gram in _count(split(text))} for several in texts.references)
    first = next(items)
    if all(grams == first for grams in items):
        return "it weights words by document frequency, and all items have the same words"
    return None


def _count(text: Sequence[str]) -> Counter[NGram]:
    return Counter(gram for n in range(1, ORDER + 1) for gram in ngrams(text, n))


def _similarity(prediction: Vector, reference: Vector) -> float:
    """Cosine similarity, with the weights of the prediction clipped to those of the reference."""
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
