"""Quality by position in the output: the percentage of n-grams that a reference contains.

Decaying schedules run fewer layers at later positions; a mean over the output would hide a loss there. The counts are
those of BLEU: summed over all positions they are the matches and totals of its precisions.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eval.score.words import ngrams

ORDERS = (1, 2)  # n of the n-grams
WIDTH = 5  # words per bin; doubled until there are at most MAX_BINS bins
MAX_BINS = 16
MIN_NGRAMS = 20  # bins with fewer n-grams are left out
RESAMPLES = 1000


@dataclass(frozen=True)
class Bin:
    """The n-grams that end on words `first` to `last` of the predictions, counted from 1.

    Attributes:
        ngrams: the number of n-grams.
        share: the percentage of them found in a reference, with clipped counts as in BLEU.
        interval: the 95 % bootstrap interval of the share over prompts.
    """

    first: int
    last: int
    ngrams: int
    share: float
    interval: tuple[float, float]


def matched_ngrams(prediction: Sequence[str], references: Sequence[Sequence[str]], n: int) -> list[bool]:
    """For each n-gram of the prediction, in order, whether a reference contains it.

    Counts are clipped as in BLEU (Papineni et al. 2002): the k-th occurrence of an n-gram matches where some reference
    contains it k times.

    >>> matched_ngrams(["the", "the", "cat"], [["the", "cat"]], 1)
    [True, False, True]
    >>> matched_ngrams(["the", "the", "cat"], [["the", "cat"]], 2)
    [False, True]
    """
    allowed: Counter[tuple[str, ...]] = Counter()
    for reference in references:
        allowed |= Counter(ngrams(reference, n))
    seen: defaultdict[tuple[str, ...], int] = defaultdict(int)
    matched = []
    for ngram in ngrams(prediction, n):
        seen[ngram] += 1
        matched.append(seen[ngram] <= allowed[ngram])
    return matched


def bin_width(lengths: Sequence[int]) -> int:
    """The number of words per bin such that all but the longest 5 % of these lengths need at most MAX_BINS bins."""
    length = sorted(lengths)[min(len(lengths) - 1, len(lengths) * 19 // 20)]
    width = WIDTH
    while length > width * MAX_BINS:
        width *= 2
    return width


def by_position(
    predictions: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]], n: int, width: int
) -> list[Bin]:
    """The bins of `width` words that hold at least MIN_NGRAMS n-grams.

    Args:
        predictions: the words of each prediction, tokenized as for BLEU (`eval.score.words`).
        references: the words of each reference, for each prediction.
        n: the length of n-grams; an n-gram belongs to the bin of its last word.
        width: words per bin.
    """
    bins = max(1, -(-max(map(len, predictions)) // width))
    held, total = (np.zeros((len(predictions), bins)) for _ in range(2))  # [texts, bins]
    for row, (prediction, texts) in enumerate(zip(predictions, references, strict=True)):
        for start, matched in enumerate(matched_ngrams(prediction, texts, n)):
            at = (start + n - 1) // width
            total[row, at] += 1
            held[row, at] += matched
    kept = np.flatnonzero(total.sum(axis=0) >= MIN_NGRAMS)
    if not len(kept):
        return []
    held, total = held[:, kept], total[:, kept]
    low, high = _intervals(held, total)
    return [
        Bin(
            first=int(at) * width + 1,
            last=(int(at) + 1) * width,
            ngrams=round(total[:, column].sum()),
            share=float(100 * held[:, column].sum() / total[:, column].sum()),
            interval=(float(low[column]), float(high[column])),
        )
        for column, at in enumerate(kept)
    ]


def _intervals(
    held: npt.NDArray[np.float64], total: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Bootstrap percentiles of the shares; the seed is fixed, so all lines use the same resamples."""
    texts = len(held)
    generator = np.random.default_rng(0)
    shares = []
    for _ in range(RESAMPLES // 100):  # in parts: all at once would take 100 MB for 10,000 prompts
        draws = generator.multinomial(texts, np.full(texts, 1 / texts), size=100).astype(float)  # [100, texts]
        drawn, out_of = draws @ held, draws @ total  # [100, bins]
        shares.append(100 * np.divide(drawn, out_of, out=np.full_like(drawn, np.nan), where=out_of > 0))
    low, high = np.nanpercentile(np.concatenate(shares), [2.5, 97.5], axis=0)
    return low, high
