"""Metrics as `evaluate` loads them.

`evaluate.load("eval/metrics/bleu")` copies that one file elsewhere and imports it from there, so the arithmetic stays
in this package, which it finds from the repository's root.
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
    "references": "for each of them a list of texts, or one text.",
    "meanings": "a meaning representation for each, such as name[Aromi], food[Italian].",
}


class Loadable(evaluate.Metric):  # type: ignore[misc]
    """Metrics of the registry that one module of `evaluate` computes.

    Attributes:
        metrics: of one family, which are described alike.
        description: one line on what is computed; None for the metric's own.
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
            inputs_description=f"predictions: a list of texts.\nreferences: {_AGAINST[metric.against]}\n",
            features=[several, one] if metric.against == "references" else one,
        )

    def _compute(self, predictions: list[str], references: list[str] | list[list[str]]) -> dict[str, Any]:
        if self.metrics[0].against == "meanings":
            texts = Texts(predictions, (), meanings=[str(meaning) for meaning in references])
        else:
            texts = Texts(predictions, as_lists(references))
        return values_of(self.metrics, texts)


class LoadableOfWords(Loadable):
    """Metrics that can count the words of another tokenizer."""

    def _compute(
        self, predictions: list[str], references: list[str] | list[list[str]], tokenizer: str | None = None
    ) -> dict[str, Any]:
        """`tokenizer`: whose words are counted, a name in `eval.score.tokenizers`; None: the metric's own."""
        if tokenizer is not None:
            load_tokenizer(tokenizer)
        return values_of(self.metrics, Texts(predictions, as_lists(references), tokenizer=tokenizer))


def values_of(metrics: Sequence[Metric], texts: Texts) -> dict[str, Any]:
    """Metric -> its value; None of one that can't be computed, and `unavailable` says why.

    Raises NotAvailableError where none can.
    """
    unavailable = obstacles(texts, [metric.name for metric in metrics])
    if len(unavailable) == len(metrics):
        raise NotAvailableError(" ".join(not_computable(unavailable)))
    values: dict[str, Any] = {
        metric.name: metric.compute(texts).value if metric.name not in unavailable else None for metric in metrics
    }
    return {**values, "unavailable": unavailable} if unavailable else values


def as_lists(references: list[str] | list[list[str]]) -> list[list[str]]:
    """References as one list for each prediction, however they were given."""
    return [[texts] if isinstance(texts, str) else texts for texts in references]
