"""Differences between two sets of predictions for the same prompts, by the paired bootstrap over stored statistics.

`eval.score.scores` tests whether two systems differ. A search stores the statistics of each prompt, batch by batch, and
later computes the difference between any two schedules with its standard error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.task import Convention
from eval.score import registry
from eval.score.bootstrap import interval, resample
from eval.score.metric import Statistics, Texts

# The metrics against references whose statistics of batches add up to those of the whole.
METRICS = tuple(m.name for m in registry.METRICS.values() if m.adds_up and m.against == "references")

Items = list[list[float]]  # for each prompt, the numbers whose sums over prompts determine the metric


@dataclass(frozen=True)
class Estimate:
    """A score, or a difference between two scores, with its bootstrap interval over prompts.

    Attributes:
        value: the value on the prompts.
        low, high: the 95 % percentile interval.
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
    """For each prediction, the statistics of a metric, as in `eval.score.scores`.

    Raises ConfigError for an unknown metric.
    """
    texts = Texts(predictions, references, convention=convention, tokenizer=tokenizer)
    items: Items = registry.metric_named(metric).compute(texts).items.tolist()
    return items


def corpus_score(metric: str, items: Items) -> float:
    """The metric, from 0 to 100, over prompts with these statistics."""
    return _restored(metric, items).value


def estimate(metric: str, items: Items, *, baseline: Items | None = None) -> Estimate:
    """The score of a system, or its difference from that of a baseline on the same prompts.

    The paired bootstrap draws prompts with replacement and scores both systems on the same draws (Koehn, "Statistical
    Significance Tests for Machine Translation Evaluation", EMNLP 2004).

    Args:
        metric: one of METRICS.
        items: the statistics of each prompt, from `sentence_statistics`.
        baseline: the statistics of the baseline, in the same order of prompts.
    """
    if baseline is not None and len(baseline) != len(items):
        raise ValueError(f"{len(items)} prompts, but the baseline has {len(baseline)}")
    own = _restored(metric, items)
    value, resampled = own.value, resample(own)
    if baseline is not None:
        other = _restored(metric, baseline)
        value, resampled = value - other.value, resampled - resample(other)
    return Estimate(value, *interval(resampled), error=float(resampled.std(ddof=1)))


def _restored(metric: str, items: Items) -> Statistics:
    """Statistics from stored items; the score function depends on the metric alone."""
    return Statistics(np.array(items, dtype=np.float64), registry.metric_named(metric).compute(Texts([], [])).score)
