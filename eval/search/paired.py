"""Differences of two sets of predictions of the same prompts: the paired bootstrap, from kept statistics.

`eval.score.scores` says whether two systems differ. A search keeps what each prompt adds to the score, batch by batch,
and asks for the difference of any two schedules later, with its standard error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.task import Convention
from eval.score import registry
from eval.score.bootstrap import interval, resample
from eval.score.metric import Statistics, Texts

# Those whose statistics of batches add up, of texts and references alone.
METRICS = tuple(metric.name for metric in registry.METRICS.values() if metric.adds_up)

Items = list[list[float]]  # for each prompt, numbers whose sums over prompts give the metric


@dataclass(frozen=True)
class Estimate:
    """A score, or a difference of two, with what chance in the choice of prompts makes of it.

    Attributes:
        value: on the prompts at hand.
        low, high: the 95 % interval, percentiles of the bootstrap.
        error: the standard error.
    """

    value: float
    low: float
    high: float
    error: float


def sentence_statistics(
    metric: str,
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    convention: Convention = "mteval",
    tokenizer: str | None = None,
) -> Items:
    """For each prediction, the numbers that the metric over all of them is made of, as `eval.score.scores` counts them.

    Raises ConfigError for an unknown metric.
    """
    texts = Texts(predictions, references, convention=convention, tokenizer=tokenizer)
    items: Items = registry.metric_named(metric).compute(texts).items.tolist()
    return items


def corpus_score(metric: str, items: Items) -> float:
    """The metric, from 0 to 100, over the prompts whose statistics these are."""
    return _restored(metric, items).value


def estimate(metric: str, items: Items, *, baseline: Items | None = None) -> Estimate:
    """The score of statistics, or how much it lies above that of a baseline on the same prompts.

    The bootstrap draws as many prompts as there are, with replacement, and looks at both on the prompts drawn (Koehn,
    "Statistical Significance Tests for Machine Translation Evaluation", EMNLP 2004).

    Args:
        metric: one of METRICS.
        items: of each prompt, as `sentence_statistics` gives them.
        baseline: likewise, in the same order of prompts.
    """
    if baseline is not None and len(baseline) != len(items):
        raise ValueError(f"{len(items)} prompts beside {len(baseline)} of the baseline")
    own = _restored(metric, items)
    value, resampled = own.value, resample(own)
    if baseline is not None:
        other = _restored(metric, baseline)
        value, resampled = value - other.value, resampled - resample(other)
    return Estimate(value, *interval(resampled), error=float(resampled.std(ddof=1)))


def _restored(metric: str, items: Items) -> Statistics:
    """Statistics from what was kept of them; how their sums score depends on the metric alone."""
    return Statistics(np.array(items, dtype=np.float64), registry.metric_named(metric).compute(Texts([], [])).score)
