"""How good predictions are: metrics by name, with confidence intervals and paired significance."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from eval import bertscore, bleu, cider, meteor, nist, rouge, slot_errors
from eval.bertscore import BertModel
from eval.bootstrap import interval, p_value, resample
from eval.metric import Array, NotAvailableError, Statistics
from skipdecode.errors import ConfigError, unknown


@dataclass(frozen=True)
class Scores:
    """What the metrics gave for one system.

    Attributes:
        values: metric -> its value: BLEU, METEOR, ROUGE and BERTScore from 0 to 100, the slot error rate in percent,
            NIST and CIDEr in their own units.
        intervals: metric -> its 95 % percentile interval over resamples of the items.
        p_values: metric -> how likely a difference from the other system as large as this one is by chance.
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


@dataclass(frozen=True)
class _Texts:
    predictions: Sequence[str]
    references: Sequence[Sequence[str]]
    meanings: Sequence[str] | None
    bert: BertModel | None


def _bertscore(texts: _Texts) -> dict[str, Statistics]:
    if texts.bert is None:
        raise NotAvailableError("it has no default model: name one with --bertscore-model")
    return {"bertscore": bertscore.bertscore(texts.predictions, texts.references, texts.bert)}


def _slot_error_rate(texts: _Texts) -> dict[str, Statistics]:
    if texts.meanings is None:
        raise NotAvailableError("it is for tasks with meaning representations, such as e2e")
    return {"slot_error_rate": slot_errors.slot_error_rate(texts.predictions, texts.meanings)}


def _of_texts(
    name: str, metric: Callable[[Sequence[str], Sequence[Sequence[str]]], Statistics]
) -> Callable[[_Texts], dict[str, Statistics]]:
    return lambda texts: {name: metric(texts.predictions, texts.references)}


def _rouge(texts: _Texts) -> dict[str, Statistics]:
    return rouge.rouge(texts.predictions, texts.references)


# Each gives its own statistics, and those of others that come of the same work.
METRICS: Mapping[str, Callable[[_Texts], dict[str, Statistics]]] = {
    "bleu": _of_texts("bleu", bleu.bleu),
    "nist": _of_texts("nist", nist.nist),
    "meteor": _of_texts("meteor", meteor.meteor),
    **dict.fromkeys(rouge.KINDS, _rouge),
    "cider": _of_texts("cider", cider.cider),
    "bertscore": _bertscore,
    "slot_error_rate": _slot_error_rate,
}


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


def score(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    metrics: Sequence[str] = ("bleu", "nist", "rouge1", "rouge2", "rougeL"),
    *,
    meanings: Sequence[str] | None = None,
    bert: BertModel | None = None,
    against: Scores | None = None,
) -> Scores:
    """The metrics of predictions, each against all of its references.

    Args:
        meanings: what each prediction must state, for the slot error rate.
        bert: the model of BERTScore.
        against: another system's scores on the same items, in the same order: p values are of the difference from it.

    Raises ConfigError for an unknown metric and for a BERTScore model that can't be loaded, and ValueError where the
    lists don't belong to each other.
    """
    lists = [references, *([meanings] if meanings is not None else [])]
    if not predictions or any(len(predictions) != len(other) for other in lists):
        raise ValueError(f"{len(predictions)} predictions for {', '.join(str(len(other)) for other in lists)}")
    if against is not None and against.items != len(predictions):
        raise ValueError(f"{len(predictions)} predictions against a system with {against.items}")
    texts = _Texts(predictions, references, meanings, bert)
    found: dict[str, Statistics] = {}
    unavailable = {}
    for name in metrics:
        if name not in METRICS:
            raise unknown("metric", name, METRICS)
        try:
            found |= METRICS[name](texts) if name not in found else {}
        except NotAvailableError as error:
            unavailable[name] = str(error)
    values = {name: found[name].value for name in metrics if name in found}
    resampled = {name: resample(found[name]) for name in values}
    p_values = {}
    if against is not None:
        for name in [name for name in values if name in against.values]:
            p_values[name] = p_value(values[name] - against.values[name], resampled[name] - against.resampled[name])
    return Scores(
        values=values,
        intervals={name: interval(scores) for name, scores in resampled.items()},
        p_values=p_values,
        metrics={name: describe(name, bert) for name in values},
        unavailable=unavailable,
        items=len(predictions),
        resampled=resampled,
    )


def describe(name: str, bert: BertModel | None = None) -> str:
    """What a metric computes, and with which version of which library."""
    if name == "bertscore":
        assert bert is not None  # else it wasn't computed
        return bertscore.describe(bert)
    modules = {"bleu": bleu, "nist": nist, "meteor": meteor, "cider": cider, "slot_error_rate": slot_errors}
    return str(modules[name].describe()) if name in modules else rouge.describe()
