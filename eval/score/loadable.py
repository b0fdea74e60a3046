"""Metrics for the library `evaluate`.

`evaluate.load("eval/metrics/bleu")` copies that one file elsewhere and imports it from there, so the implementation is
in this package, which is importable from the root of the repository.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import datasets
import evaluate

from eval.score.metric import Metric, NotAvailableError, Texts
from eval.score.scores import not_computable, obstacles
from eval.score.tokenizers import load_tokenizer

_TEXT = datasets.Value("string")
_AGAINST = {
    "references": "for each prediction, a list of references or a single one.",
    "meanings": "for each prediction, a meaning representation such as name[Aromi], food[Italian].",
}


class Loadable(evaluate.Metric):  # type: ignore[misc]
    """One or several metrics of the registry as a module of `evaluate`.

    Attributes:
        metrics: the metrics, which share a description.
        description: one line on what is computed; None for the description of the metric.
    """

    metrics: ClassVar[tuple[Metric, ...]]
    description: ClassVar[str | None] = None

    def _info(self) -> evaluate.MetricInfo:
        metric = self.metrics[0]
        one = datasets.Features({"predictions": _TEXT, "references": _TEXT})
        several = datasets.Features({"predictions": _TEXT, "references": datasets.Sequence(_TEXT)})
        return evaluate.MetricInfo(
            description=self.description or metric.describe(Texts((), ())),
            citation=metric.citation,
            inputs_description=f"predictions: a list of strings.\nreferences: {_AGAINST[metric.against]}\n",
            features=[several, one] if metric.against == "references" else one,
        )

    def _compute(self, predictions: list[str], references: list[str] | list[list[str]]) -> dict[str, Any]:
        if self.metrics[0].against == "meanings":
            texts = Texts(predictions, (), meanings=[str(meaning) for meaning in references])
        else:
            texts = Texts(predictions, as_lists(references))
        return values_of(self.metrics, texts)


class LoadableOfWords(Loadable):
    """Metrics that support another tokenizer."""

    def _compute(
        self, predictions: list[str], references: list[str] | list[list[str]], tokenizer: str | None = None
    ) -> dict[str, Any]:
        """`tokenizer`: a name in `eval.score.tokenizers`; None: the metric's own."""
        if tokenizer is not None:
            load_tokenizer(tokenizer)
        return values_of(self.metrics, Texts(predictions, as_lists(references), tokenizer=tokenizer))


def values_of(metrics: Sequence[Metric], texts: Texts) -> dict[str, Any]:
    """Metric -> its value; None for a metric that can't be computed, with the reason in `unavailable`.

    Raises NotAvailableError where no metric can be computed.
    """
    unavailable = obstacles(texts, [metric.name for metric in metrics])
    if len(unavailable) == len(metrics):
        raise NotAvailableError(" ".join(not_computable(unavailable)))
    values: dict[str, Any] = {
        metric.name: metric.compute(texts).value if metric.name not in unavailable else None for metric in metrics
    }
    return {**values, "unavailable": unavailable} if unavailable else values


def as_lists(references: list[str] | list[list[str]]) -> list[list[str]]:
    """References as a list for each prediction."""
    return [[texts] if isinstance(texts, str) else texts for texts in references]
