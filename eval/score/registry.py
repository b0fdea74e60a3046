"""The metrics that there are: a new one is a file and a line here."""

from collections.abc import Mapping
from dataclasses import replace

from eval.score.bertscore import BERTSCORE
from eval.score.bleu import BLEU
from eval.score.cider import CIDER
from eval.score.meteor import METEOR
from eval.score.metric import Metric
from eval.score.nist import NIST
from eval.score.rouge import ROUGE
from eval.score.slot_errors import SLOT_ERROR_RATE
from skipdecode.errors import unknown

# By name, in the order of tables.
METRICS: dict[str, Metric] = {
    metric.name: metric for metric in (BLEU, NIST, METEOR, *ROUGE, CIDER, BERTSCORE, SLOT_ERROR_RATE)
}


PART = ":"  # parts a metric's name from that of a part of the test set


def metric_named(name: str) -> Metric:
    """The metric of a score's name, such as `bleu`, or `bleu:unseen` of a part of the test set.

    Raises ConfigError for one that there isn't.
    """
    whole, _, part = name.partition(PART)
    if whole not in METRICS or (part and not part.isidentifier()):
        raise unknown("metric", name, METRICS)
    metric = METRICS[whole]
    if not part:
        return metric
    # There is room for one metric's parts: that of headlines.
    label, long_label, narrow = f"{metric.label} {part}", f"{metric.title} {part}", metric is BLEU
    return replace(metric, name=name, label=label, long_label=long_label, in_short_table=narrow)


def short(scores: Mapping[str, float]) -> list[Metric]:
    """The metrics of a row's scores that a narrow table has room for, or else all of them."""
    found, order = [metric_named(name) for name in scores], list(METRICS)
    narrow = filter(lambda metric: metric.in_short_table, found)
    return sorted(narrow, key=lambda metric: order.index(metric.name.partition(PART)[0])) or found


def headline(scores: Mapping[str, float]) -> Metric:
    """The metric that stands for the quality of a row: BLEU, or the first one without it."""
    return BLEU if BLEU.name in scores else metric_named(next(iter(scores)))
