"""The registry of metrics; a new one is a module and a line here."""

from collections.abc import Mapping
from dataclasses import replace

from eval.score.bertscore import BERTSCORE
from eval.score.bleu import BLEU
from eval.score.cider import CIDER
from eval.score.exact_match import EXACT_MATCH
from eval.score.meteor import METEOR
from eval.score.metric import Metric
from eval.score.nist import NIST
from eval.score.rouge import ROUGE
from eval.score.slot_errors import SLOT_ERROR_RATE
from skipdecode.errors import unknown

# By name, in the order of columns in tables.
METRICS: dict[str, Metric] = {
    metric.name: metric for metric in (EXACT_MATCH, BLEU, NIST, METEOR, *ROUGE, CIDER, BERTSCORE, SLOT_ERROR_RATE)
}


PART = ":"  # separates the name of a metric from that of a part of the test set


def metric_named(name: str) -> Metric:
    """The metric of a score name, such as `bleu`, or `bleu:unseen` for a part of the test set.

    Raises ConfigError for an unknown metric.
    """
    whole, _, part = name.partition(PART)
    if whole not in METRICS or (part and not part.isidentifier()):
        raise unknown("metric", name, METRICS)
    metric = METRICS[whole]
    if not part:
        return metric
    # Narrow tables only show the parts of the headline metric.
    label, long_label, narrow = f"{metric.label} {part}", f"{metric.title} {part}", metric is BLEU
    return replace(metric, name=name, label=label, long_label=long_label, in_short_table=narrow)


def short(scores: Mapping[str, float]) -> list[Metric]:
    """The metrics that narrow tables show, or all where there is none of them."""
    found, order = [metric_named(name) for name in scores], list(METRICS)
    narrow = filter(lambda metric: metric.in_short_table, found)
    return sorted(narrow, key=lambda metric: order.index(metric.name.partition(PART)[0])) or found


def headline(scores: Mapping[str, float]) -> Metric:
    """The metric that represents quality: exact match, else BLEU, or the first one without both."""
    first = next((metric for metric in (EXACT_MATCH, BLEU) if metric.name in scores), None)
    return first or metric_named(next(iter(scores)))
