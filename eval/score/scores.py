"""Score predictions, with confidence intervals and paired significance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from data.task import Convention
from eval.score.bootstrap import interval, p_value, resample
from eval.score.metric import Array, BertModel, NotAvailableError, Statistics, Texts
from eval.score.registry import METRICS, PART, metric_named
from eval.score.tokenizers import load_tokenizer
from skipdecode.errors import ConfigError, unknown

NOT_COMPUTABLE = "not computable"


@dataclass(frozen=True)
class Scores:
    """The scores of one system.

    Attributes:
        values: metric -> its value: BLEU, METEOR, ROUGE and BERTScore from 0 to 100, the slot error rate in percent,
            NIST and CIDEr in their own units; `bleu:seen` is BLEU of a part of the items.
        intervals: metric -> its 95 % bootstrap percentile interval; empty for a single item.
        p_values: metric -> the probability that a difference this large from the other system arises by chance; 1 for
            a single item.
        metrics: metric -> what was computed, and with which version.
        unavailable: metric -> why it couldn't be computed.
        items: the number of predictions.
        resampled: metric -> its value in each resample, [resamples].
    """

    values: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    p_values: dict[str, float]
    metrics: dict[str, str]
    unavailable: dict[str, str]
    items: int
    resampled: dict[str, Array] = field(repr=False, compare=False)


def choose_metrics(
    task: Sequence[str], requested: Sequence[str] | None = None, bert: BertModel | None = None
) -> tuple[str, ...]:
    """The requested metrics, by default those of the task; BERTScore if and only if a model is given for it.

    Raises ConfigError for an unknown metric, and for BERTScore without a model.
    """
    for name in requested or ():
        if name not in METRICS:
            raise unknown("metric", name, METRICS)
    if requested and "bertscore" in requested and bert is None:
        raise ConfigError("bertscore is among the metrics but has no model: give a folder or a Hub name")
    wanted = [name for name in requested or task if name != "bertscore"]
    return tuple(dict.fromkeys([*wanted, "bertscore"] if bert is not None else wanted))


def obstacles(texts: Texts, metrics: Sequence[str]) -> dict[str, str]:
    """Metric -> the reason why predictions can't be scored against these references.

    Raises ConfigError for an unknown metric.
    """
    for name in metrics:
        if name not in METRICS:
            raise unknown("metric", name, METRICS)
    found = {name: METRICS[name].obstacle(texts) for name in metrics}
    return {name: reason for name, reason in found.items() if reason is not None}


def not_computable(unavailable: Mapping[str, str]) -> list[str]:
    """A sentence for each metric that couldn't be computed."""
    return [f"{metric_named(name).label}: {NOT_COMPUTABLE}, because {reason}." for name, reason in unavailable.items()]


def check_some(unavailable: Mapping[str, str], metrics: Sequence[str]) -> None:
    """Raise ConfigError where no metric can be computed."""
    if set(metrics) <= unavailable.keys():
        reasons = "; ".join(f"{name}: {reason}" for name, reason in unavailable.items())
        raise ConfigError(f"no metric can be computed: {reasons}")


def score(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    metrics: Sequence[str] = ("bleu", "nist", "rouge1", "rouge2", "rougeL"),
    *,
    meanings: Sequence[str] | None = None,
    bert: BertModel | None = None,
    against: Scores | None = None,
    convention: Convention = "mteval",
    parts: Sequence[str] | None = None,
    tokenizer: str | None = None,
) -> Scores:
    """Score predictions against all of their references.

    Args:
        predictions: the prediction of each item.
        references: the references of each item.
        metrics: names of metrics.
        meanings: the meaning representation of each item, for the slot error rate.
        bert: the model of BERTScore.
        against: the scores of another system on the same items in the same order, for p values of the difference.
        convention: the rules by which BLEU tokenizes.
        parts: the part of the test set of each item, which is also scored separately; empty for none.
        tokenizer: for BLEU, NIST, ROUGE and CIDEr, a name in `eval.score.tokenizers`; None: each metric's own.

    Raises ConfigError for an unknown metric or tokenizer and for a tokenizer or BERTScore model that can't be loaded,
    and ValueError where the lists have different lengths.
    """
    lists = [references, *(each for each in (meanings, parts) if each is not None)]
    metrics = tuple(dict.fromkeys(metrics))
    if not predictions or any(len(predictions) != len(other) for other in lists):
        raise ValueError(f"{len(predictions)} predictions for {', '.join(str(len(other)) for other in lists)}")
    if against is not None and against.items != len(predictions):
        raise ValueError(f"{len(predictions)} predictions, but the other system has {against.items}")
    texts = Texts(predictions, references, meanings, bert, convention, tokenizer)
    if tokenizer is not None:
        load_tokenizer(tokenizer)
    by_part: dict[str, dict[str, Statistics]] = {}
    unavailable = obstacles(texts, metrics)
    for part in ("", *dict.fromkeys(filter(None, parts or ()))):
        numbers = [n for n, own in enumerate(parts or ()) if own == part]
        chosen = _subset(texts, numbers) if part else texts
        for name in [name for name in metrics if name not in unavailable]:
            key, total = name + PART + part if part else name, by_part.setdefault(name, {}).get(name)
            if part and (reason := METRICS[name].obstacle(chosen)) is not None:
                unavailable[key] = reason
                continue
            try:
                if part and total is not None and METRICS[name].adds_up:
                    by_part[name][key] = Statistics(total.items[numbers], total.score)
                else:
                    by_part[name][key] = METRICS[name].compute(chosen)
            except NotAvailableError as error:
                unavailable[key] = str(error)
    found = {name: statistics for several in by_part.values() for name, statistics in several.items()}
    values = {name: statistics.value for name, statistics in found.items()}
    resampled = {name: resample(found[name]) for name in values}
    # Resampling a single item has no variance.
    several = {name for name in values if len(found[name].items) > 1}
    p_values = {}
    if against is not None:
        for name in [name for name in values if name in against.values]:
            difference, redrawn = values[name] - against.values[name], resampled[name] - against.resampled[name]
            p_values[name] = p_value(difference, redrawn) if name in several else 1.0
    return Scores(
        values=values,
        intervals={name: interval(scores) for name, scores in resampled.items() if name in several},
        p_values=p_values,
        metrics={name: METRICS[name.partition(PART)[0]].describe(texts) for name in values},
        unavailable=unavailable,
        items=len(predictions),
        resampled=resampled,
    )


def _subset(texts: Texts, numbers: Sequence[int]) -> Texts:
    return replace(
        texts,
        predictions=[texts.predictions[n] for n in numbers],
        references=[texts.references[n] for n in numbers],
        meanings=None if texts.meanings is None else [texts.meanings[n] for n in numbers],
    )
