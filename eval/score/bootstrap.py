"""Bootstrap over test items: confidence intervals and paired significance (Koehn, EMNLP 2004)."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from eval.score.metric import Array, Statistics

RESAMPLES = 1000
SEED = 12345  # the default of sacrebleu, for equal p values of BLEU
CONFIDENCE = 0.95
SIGNIFICANT = 0.05


def resample(statistics: Statistics) -> Array:
    """The score of each resample of the items with replacement, [RESAMPLES].

    The draws depend on the number of items only, so separate calls for two systems are paired.
    """
    sums = _draws(len(statistics.items)) @ statistics.items  # [resamples, columns]
    return np.array([statistics.score(row) for row in sums])


def interval(scores: Array) -> tuple[float, float]:
    """The 95 % percentile interval of resampled scores, [resamples]."""
    outside = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(scores, [outside, 100 - outside])
    return float(low), float(high)


def p_value(difference: float, resampled: Array) -> float:
    """The p value of a difference, by the paired bootstrap of sacrebleu.

    Args:
        difference: the score of one system minus that of another.
        resampled: the same difference in each resample, [resamples].

    It is the fraction of resamples whose absolute difference exceeds the mean absolute difference by more than
    |difference|. A difference of exactly 0 has p = 1 here; sacrebleu gives 0.001. Since absolute differences are
    centred, a clear difference has a one-sided p value, and one near 0 has about 0.4.
    """
    if difference == 0:
        return 1.0
    magnitudes = np.abs(resampled)
    exceeding = int(np.sum(magnitudes - magnitudes.mean() > abs(difference)))
    return (exceeding + 1) / (len(magnitudes) + 1)


@lru_cache(maxsize=4)  # a search uses a few numbers of items
def _draws(items: int) -> NDArray[np.uint16]:
    """The count of each item in each resample, [RESAMPLES, items]."""
    drawn = np.random.default_rng(SEED).choice(items, size=(RESAMPLES, items), replace=True)
    return np.stack([np.bincount(row, minlength=items) for row in drawn]).astype(np.uint16)
