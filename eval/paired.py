"""Whether one set of predictions is better than another of the same prompts: the paired bootstrap."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU

from skipdecode.errors import unknown

METRICS = {"bleu": "BLEU", "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}  # and how they are written
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

    For BLEU n-grams matched, n-grams and lengths, as `eval.scores` counts them; for ROUGE the best reference's F1.
    Raises ConfigError for an unknown metric.
    """
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)
    if metric == "bleu":
        bleu = BLEU(lowercase=True, tokenize="13a", effective_order=True)  # which changes no count, and warns of none
        scores = [bleu.sentence_score(p, list(r)) for p, r in zip(predictions, references, strict=True)]
        return [[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in scores]
    scorer = RougeScorer([metric], use_stemmer=True)
    pairs = zip(predictions, references, strict=True)
    return [[100 * scorer.score_multi(list(texts), text)[metric].fmeasure] for text, texts in pairs]


def corpus_score(metric: str, statistics: Statistics) -> float:
    """The metric, from 0 to 100, over the prompts whose statistics these are."""
    return float(_scores(metric, np.asarray(statistics).sum(axis=0, keepdims=True), len(statistics))[0])


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
    drawn = _draws(prompts, seed)
    values = _scores(metric, drawn @ np.asarray(statistics), prompts)
    if baseline is not None:
        values = values - _scores(metric, drawn @ np.asarray(baseline), prompts)
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return Estimate(float(values[0]), float(low), float(high), float(values[1:].std(ddof=1)))


@lru_cache(maxsize=4)  # a search compares every schedule on the same few numbers of prompts
def _draws(prompts: int, seed: int) -> np.ndarray:
    """How often each prompt is drawn, [1 + resamples, prompts]: once in the first row, which is the data itself."""
    times = np.random.default_rng(seed).multinomial(prompts, [1 / prompts] * prompts, size=RESAMPLES)
    return np.concatenate([np.ones((1, prompts)), times]).astype(np.int16)


def _scores(metric: str, sums: np.ndarray, prompts: int) -> np.ndarray:
    """The metric of each row of `sums` [rows, statistics], over so many prompts each: [rows]."""
    if metric != "bleu":
        return np.asarray(sums[:, 0] / prompts)
    orders = (sums.shape[1] - 2) // 2
    scores = [
        BLEU.compute_bleu(row[:orders], row[orders:-2], row[-2], row[-1], smooth_method="exp").score
        for row in sums.astype(int).tolist()
    ]
    return np.array(scores)
