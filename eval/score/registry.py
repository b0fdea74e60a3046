"""The metrics that there are: a new one is a file and a line here."""

from collections.abc import Mapping

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


def metric_named(name: str) -> Metric:
    """The metric of a name. Raises ConfigError for one that there isn't."""
    if name not in METRICS:
        raise unknown("metric", name, METRICS)
    return METRICS[name]


def short(scores: Mapping[str, float]) -> list[Metric]:
    """The metrics of a row's scores that a narrow table has room for, or else all of them."""
    found = [metric_named(name) for name in scores]
    return sorted(filter(lambda m: m.in_short_table, found), key=list(METRICS.values()).index) or found


def headline(scores: Mapping[str, float]) -> Metric:
    """The metric that stands for the quality of a row: BLEU, or the first one without it."""
    return BLEU if BLEU.name in scores else metric_named(next(iter(scores)))
