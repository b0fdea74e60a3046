"""ROUGE-1, ROUGE-2 and ROUGE-L for `evaluate`: `evaluate.load("eval/metrics/rouge")`."""

from typing import Any

import evaluate

from eval.loadable import as_lists, compares_with_references
from eval.rouge import describe, rouge

CITATION = "Lin, Text Summarization Branches Out 2004"


class Rouge(evaluate.Metric):  # type: ignore[misc]
    """As in `eval.rouge`, from the root of the repository."""

    def _info(self) -> evaluate.MetricInfo:
        return compares_with_references(describe(), CITATION)

    def _compute(self, predictions: list[str], references: list[str] | list[list[str]]) -> dict[str, Any]:
        kinds = rouge(predictions, as_lists(references))
        return {kind: statistics.value for kind, statistics in kinds.items()}
