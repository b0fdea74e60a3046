"""Scores of predictions: metrics by name, with confidence intervals and paired significance."""

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
    """Scores of one system.

    Attributes:
        values: metric -> its value: BLEU, METEOR, ROUGE and BERTScore from 0 to 100, the slot error rate in percent,
            NIST and CIDEr in their own units; `bleu:seen` is that of a part of the items.
        intervals: metric -> its 95 % percentile interval over resamples of the items; none of a single item.
        p_values: metric -> how likely a difference from the other system as large as this one is by chance;
            1 of a single item.
        metrics: metric -> what was computed, and with which version.
        unavailable: metric -> why it couldn't be computed.
        resampled: metric -> its value in each resample, [resamples].
        items: how many predictions there are.
    """

    values: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    p_values: dict[str, float]
    metrics: dict[str, str]
    unavailable: dict[str, str]
    items: int
    resampled: dict[str, Array] = field(repr=False, compare=False)


def choose_metrics(
    task: Sequence[str], asked: Sequence[str] | None = None, bert: BertModel | None = None
) -> tuple[str, ...]:
    """The metrics asked for, or else the task's; BERTScore wherever a model is named for it, and nowhere else.

    Raises ConfigError for a name that is no metric, and for BERTScore asked for without a model.
    """
    for name in asked or ():
        if name not in METRICS:
            raise unknown("metric", name, METRICS)
    if asked and "bertscore" in asked and bert is None:
        raise ConfigError("bertscore is among the metrics and has no model: name a folder or a Hub name for it")
    wanted = [name for name in asked or task if name != "bertscore"]
    return tuple(dict.fromkeys([*wanted, "bertscore"] if bert is not None else wanted))


def obstacles(texts: Texts, metrics: Sequence[str]) -> dict[str, str]:
    """Metric -> why no predictions can be scored against these references, of those that can't.

    Raises ConfigError for an unknown metric.
    """
    for name in metrics:
        if name not in METRICS:
            raise unknown("metric", name, METRICS)
    found = {name: METRICS[name].obstacle(texts) for name in metrics}
    return {name: reason for name, reason in found.items() if reason is not None}


def not_computable(unavailable: Mapping[str, str]) -> list[str]:
    """A sentence for each metric without a score."""
    return [f"{metric_named(name).label}: {NOT_COMPUTABLE}, because {reason}." for name, reason in unavailable.items()]


def check_some(unavailable: Mapping[str, str], metrics: Sequence[str]) -> None:
    """Raise ConfigError where none of the metrics can be computed."""
    if set(metrics) <= unavailable.keys():
        reasons = "; ".join(f"{name}: {reason}" for name, reason in unavailable.items())
        raise ConfigError(f"none of the metrics can be computed: {reasons}")


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
    """The metrics of predictions, each against all of its references.

    Args:
        meanings: what each prediction must state, for the slot error rate.
        bert: the model of BERTScore.
        against: another system's scores on the same items, in the same order: p values are of the difference from it.
        convention: by whose rules BLEU counts words.
        parts: of each item, the part of the test set that has scores of its own; empty for none.
        tokenizer: whose words BLEU, NIST, ROUGE and CIDEr count, a name in `eval.score.tokenizers`; None: each its own.

    Raises ConfigError for an unknown metric or tokenizer and for a tokenizer or BERTScore model that can't be loaded,
    and ValueError where the lists don't belong to each other.
    """
    lists = [references, *(each for each in (meanings, parts) if each is not None)]
    metrics = tuple(dict.fromkeys(metrics))
    if not predictions or any(len(predictions) != len(other) for other in lists):
        raise ValueError(f"{len(predictions)} predictions for {', '.join(str(len(other)) for other in lists)}")
    if against is not None and against.items != len(predictions):
        raise ValueError(f"{len(predictions)} predictions against a system with {against.items}")
    texts = Texts(predictions, references, meanings, bert, convention, tokenizer)
    if tokenizer is not None:
        load_tokenizer(tokenizer)
    by_part: dict[str, dict[str, Statistics]] = {}
    unavailable = obstacles(texts, metrics)
    for part in ("", *dict.fromkeys(filter(None, parts or ()))):
        numbers = [n for n, own in enumerate(parts or ()) if own == part]
        chosen = _taken(texts, numbers) if part else texts
        for name in [name for name in metrics if name not in unavailable]:
            key, whole = name + PART + part if part else name, by_part.setdefault(name, {}).get(name)
            if part and (reason := METRICS[name].obstacle(chosen)) is not None:
                unavailable[key] = reason
                continue
            try:
                if part and whole is not None and METRICS[name].adds_up:
                    by_part[name][key] = Statistics(whole.items[numbers], whole.score)
                else:
                    by_part[name][key] = METRICS[name].compute(chosen)
            except NotAvailableError as error:
                unavailable[key] = str(error)
    found = {name: statistics for several in by_part.values() for name, statistics in several.items()}
    values = {name: statistics.value for name, statistics in found.items()}
    resampled = {name: resample(found[name]) for name in values}
    # Every resample of a single item is that item: they say nothing of chance.
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


def _taken(texts: Texts, numbers: Sequence[int]) -> Texts:
    """The items of these numbers alone."""
    return replace(
        texts,
        predictions=[texts.predictions[n] for n in numbers],
        references=[texts.references[n] for n in numbers],
        meanings=None if texts.meanings is None else [texts.meanings[n] for n in numbers],
    )
