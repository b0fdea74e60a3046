"""Quality by position in the text: how many of its n-grams a reference holds.

A budget falls with the position, so a loss that a mean over the text hides would show here. The counts are BLEU's:
summed over all positions they are the matches and totals of its precisions.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eval.score.words import ngrams

ORDERS = (1, 2)  # n of the n-grams
WIDTH = 5  # words of a bin; doubled until there are at most MOST_BINS
MOST_BINS = 16
FEWEST = 20  # n-grams that a bin needs to be shown
RESAMPLES = 1000


@dataclass(frozen=True)
class Bin:
    """The n-grams that end on words `first` to `last` of the predictions, counted from 1.

    Attributes:
        ngrams: how many there are.
        share: percent of them that a reference holds, each no oftener than the reference that has it most often.
        interval: the 95 % interval of the share, over resampled prompts.
    """

    first: int
    last: int
    ngrams: int
    share: float
    interval: tuple[float, float]


def matched_ngrams(prediction: Sequence[str], references: Sequence[Sequence[str]], n: int) -> list[bool]:
    """For each n-gram of the prediction, in order, whether a reference holds it.

    Clipped as BLEU's precisions are (Papineni et al. 2002): the k-th of equal n-grams counts where some reference holds
    it k times.

    >>> matched_ngrams(["the", "the", "cat"], [["the", "cat"]], 1)
    [True, False, True]
    >>> matched_ngrams(["the", "the", "cat"], [["the", "cat"]], 2)
    [False, True]
    """
    most: Counter[tuple[str, ...]] = Counter()
    for reference in references:
        most |= Counter(ngrams(reference, n))
    seen: defaultdict[tuple[str, ...], int] = defaultdict(int)
    matched = []
    for ngram in ngrams(prediction, n):
        seen[ngram] += 1
        matched.append(seen[ngram] <= most[ngram])
    return matched


def bin_width(lengths: Sequence[int]) -> int:
    """Words of a bin, such that texts of these lengths, but for the longest twentieth, take at most MOST_BINS."""
    length = sorted(lengths)[min(len(lengths) - 1, len(lengths) * 19 // 20)]
    width = WIDTH
    while length > width * MOST_BINS:
        width *= 2
    return width


def by_position(
    predictions: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]], n: int, width: int
) -> list[Bin]:
    """The bins of `width` words each in which there are at least FEWEST n-grams.

    Args:
        predictions: words of each text, as BLEU counts them (`eval.score.words`).
        references: words of each reference, for each text.
        n: length of the n-grams; one belongs to the bin of its last word.
    """
    bins = max(1, -(-max(map(len, predictions)) // width))
    held, total = (np.zeros((len(predictions), bins)) for _ in range(2))  # [texts, bins]
    for row, (prediction, texts) in enumerate(zip(predictions, references, strict=True)):
        for start, matched in enumerate(matched_ngrams(prediction, texts, n)):
            at = (start + n - 1) // width
            total[row, at] += 1
            held[row, at] += matched
    kept = np.flatnonzero(total.sum(axis=0) >= FEWEST)
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
    """Percentiles of the shares when prompts are drawn again; the same draws each time, so that lines share them."""
    texts = len(held)
    generator = np.random.default_rng(0)
    shares = []
    for _ in range(RESAMPLES // 100):  # in parts: all draws at once would take 100 MB for a test set of ten thousand
        draws = generator.multinomial(texts, np.full(texts, 1 / texts), size=100).astype(float)  # [100, texts]
        drawn, out_of = draws @ held, draws @ total  # [100, bins]
        shares.append(100 * np.divide(drawn, out_of, out=np.full_like(drawn, np.nan), where=out_of > 0))
    low, high = np.nanpercentile(np.concatenate(shares), [2.5, 97.5], axis=0)
    return low, high
