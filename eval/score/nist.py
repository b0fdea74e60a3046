"""NIST (Doddington, HLT 2002) as defined by mteval-v13a and the scorer of the E2E NLG challenge."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from eval.score.metric import Array, Metric, Statistics, Texts
from eval.score.tokenizers import signature, unspaced_obstacle, words_by
from eval.score.words import ngrams, words

ORDER = 5  # the longest n-grams, in words
# The brevity penalty is 0.5 for outputs with two thirds of the references' words.
BETA = math.log(2) / math.log(3 / 2) ** 2

NGram = tuple[str, ...]


def nist(predictions: Sequence[str], references: Sequence[Sequence[str]], tokenizer: str | None = None) -> Statistics:
    """NIST, from 0 up: n-grams are weighted by their information, log2(count of the prefix / count of the n-gram).

    Counts are over all references. Matches are clipped to the maximum count in a reference; the length is compared with
    the mean length of all references, so items with more references count more. Resampling uses the weights of the
    whole test set. This is the definition of mteval-v13a in Perl, whose scores the challenge published; the Python
    option of its scorer (tuetschek/e2e-metrics) averages the lengths of each item's references first.
    """
    split = words_by(tokenizer, words)
    tokenized = [[split(text) for text in texts] for texts in references]
    counts: Counter[NGram] = Counter()
    for texts in tokenized:
        for text in texts:
            counts[()] += len(text)
            for n in range(1, ORDER + 1):
                counts.update(ngrams(text, n))
    items = []
    for prediction, texts in zip(predictions, tokenized, strict=True):
        text = split(prediction)
        information, totals = [], []
        for n in range(1, ORDER + 1):
            found = Counter(ngrams(text, n))
            allowed: Counter[NGram] = Counter()
            for reference in texts:
                allowed |= Counter(ngrams(reference, n))
            matched = found & allowed
            information.append(sum(k * math.log2(counts[gram[:-1]] / counts[gram]) for gram, k in matched.items()))
            totals.append(found.total())
        items.append([*information, *totals, len(text), sum(map(len, texts)), len(texts), 1])
    return Statistics(np.array(items, dtype=np.float64), _score)


def _describe(texts: Texts) -> str:
    tokens = f"{signature(texts.tokenizer) if texts.tokenizer is not None else '13a'} tokens"
    return f"mteval-v13a's definition, n = {ORDER}, case-insensitive, {tokens}, all references"


def _obstacle(texts: Texts) -> str | None:
    if obstacle := unspaced_obstacle(texts.expected, texts.tokenizer, "13a"):
        return obstacle
    split = words_by(texts.tokenizer, words)
    known: set[str] = set()
    for text in texts.expected:
        known.update(split(text))
        if len(known) > 1:
            return None
    return "it weights words by their rarity, and the references have fewer than two different words"


def _score(sums: Array) -> float:
    information, totals = sums[:ORDER], sums[ORDER : 2 * ORDER]
    system_words, reference_words, references, count = sums[2 * ORDER :]
    if system_words == 0 or reference_words == 0:
        return 0.0
    ratio = min(1.0, system_words / (count * reference_words / references))
    penalty = math.exp(-BETA * math.log(ratio) ** 2)
    return penalty * sum(float(i / total) for i, total in zip(information, totals, strict=True) if total)


NIST = Metric(
    "nist",
    "NIST",
    "Doddington, HLT 2002",
    lambda texts: nist(texts.predictions, texts.references, texts.tokenizer),
    _describe,
    _obstacle,
    in_short_table=True,
    decimals=3,
)
