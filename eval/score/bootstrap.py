"""Bootstrap over test items: the confidence interval of a score, and whether two systems differ (Koehn, EMNLP 2004)."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from eval.score.metric import Array, Statistics

RESAMPLES = 1000
SEED = 12345  # sacrebleu's default, so that the p values of BLEU are its own
CONFIDENCE = 0.95
SIGNIFICANT = 0.05


def resample(statistics: Statistics) -> Array:
    """The score of each resample, [RESAMPLES]: as many items as there are, drawn with replacement.

    The draws depend on the number of items alone, so systems that are resampled apart are paired.
    """
    sums = _draws(len(statistics.items)) @ statistics.items  # [resamples, columns]
    return np.array([statistics.score(row) for row in sums])


def interval(scores: Array) -> tuple[float, float]:
    """The 95 % percentile interval of resampled scores, [resamples]."""
    outside = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(scores, [outside, 100 - outside])
    return float(low), float(high)


def over_seeds(resampled: Sequence[Array]) -> Array:
    """Means over trainings with several seeds, [resamples], of what each has in the same resamples of the items.

    In each as many seeds as there are are drawn, with replacement.
    """
    each = np.stack(resampled)
    drawn = np.random.default_rng(SEED).integers(len(each), size=each.T.shape)  # [resamples, seeds]
    means: Array = each[drawn, np.arange(len(drawn))[:, None]].mean(axis=1)
    return means


def p_value(difference: float, resampled: Array) -> float:
    """Probability of a difference of this size, of either sign, by chance.

    Args:
        difference: one system's score less another's.
        resampled: the same in each resample, [resamples].

    As in sacrebleu's paired bootstrap: the share of resamples whose difference is further above the mean difference
    than `difference` is above 0, of absolute values. But no difference at all is 1 here; sacrebleu gives it 0.001.
    As sizes are centred, and not differences, a clear difference has the p of one tail, and one of nearly 0 about 0.4.
    """
    if difference == 0:
        return 1.0
    sizes = np.abs(resampled)
    by_chance = int(np.sum(sizes - sizes.mean() > abs(difference)))
    return (by_chance + 1) / (len(sizes) + 1)


@lru_cache(maxsize=4)  # a search compares on a few numbers of items
def _draws(items: int) -> NDArray[np.uint16]:
    """Counts of each item in each resample: [RESAMPLES, items]."""
    drawn = np.random.default_rng(SEED).choice(items, size=(RESAMPLES, items), replace=True)
    return np.stack([np.bincount(row, minlength=items) for row in drawn]).astype(np.uint16)
