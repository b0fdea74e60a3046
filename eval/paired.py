"""Whether one set of predictions is better than another of the same prompts: the paired bootstrap."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU

from skipdecode.errors import unknown

METRICS = ("bleu", "rouge1", "rouge2", "rougeL")
RESAMPLES = 1000

Statistics = list[list[float]]  # for each prompt, numbers whose sums over prompts give the metric


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
    metric: str, predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> list[list[float]]:
    """For each prediction, the numbers that the metric over all of them is made of.

    For BLEU n-grams matched, n-grams and lengths, as `eval.scores` counts them; for ROUGE the best reference's F1. The
    sums belong to `corpus_score`. Raises ConfigError for an unknown metric.
    """
    _check(metric)
    if metric == "bleu":
        bleu = BLEU(lowercase=True, tokenize="13a", effective_order=True)  # which changes no count, and warns of none
        scores = [bleu.sentence_score(p, list(r)) for p, r in zip(predictions, references, strict=True)]
        return [[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in scores]
    scorer = RougeScorer([metric], use_stemmer=True)
    pairs = zip(predictions, references, strict=True)
    return [[100 * scorer.score_multi(list(texts), text)[metric].fmeasure] for text, texts in pairs]


def corpus_score(metric: str, sums: Sequence[float], prompts: int) -> float:
    """The metric, from 0 to 100, of statistics that add up to `sums` over so many prompts."""
    if metric != "bleu":
        return float(sums[0]) / prompts
    orders = (len(sums) - 2) // 2
    correct, total = [int(n) for n in sums[:orders]], [int(n) for n in sums[orders:-2]]
    return float(BLEU.compute_bleu(correct, total, int(sums[-2]), int(sums[-1]), smooth_method="exp").score)


def estimate(metric: str, statistics: Statistics, *, baseline: Statistics | None = None, seed: int = 0) -> Estimate:
    """The score of statistics, or how much it lies above that of a baseline on the same prompts.

    The bootstrap draws as many prompts as there are, with replacement, and looks at both on the prompts drawn (Koehn,
    "Statistical Significance Tests for Machine Translation Evaluation", EMNLP 2004). The same seed draws the same
    prompts.

    Args:
        metric: one of METRICS.
        statistics: of each prompt, as `sentence_statistics` gives them.
        baseline: likewise, in the same order of prompts.
    """
    prompts = len(statistics)
    if baseline is not None and len(baseline) != prompts:
        raise ValueError(f"{prompts} prompts beside {len(baseline)} of the baseline")
    times = np.random.default_rng(seed).multinomial(prompts, [1 / prompts] * prompts, size=RESAMPLES)
    drawn = np.concatenate([np.ones((1, prompts), dtype=times.dtype), times])  # [1 + resamples, prompts]; all, first

    def scores(rows: Statistics) -> np.ndarray:
        sums = drawn @ np.asarray(rows)  # [1 + resamples, statistics]
        return np.array([corpus_score(metric, row, prompts) for row in sums.tolist()])

    values = scores(statistics)
    if baseline is not None:
        values = values - scores(baseline)
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return Estimate(float(values[0]), float(low), float(high), float(values[1:].std(ddof=1)))


def _check(metric: str) -> None:
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)
