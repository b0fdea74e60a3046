"""METEOR for `evaluate`: `evaluate.load("eval/metrics/meteor")`."""

from typing import Any

import evaluate

from eval.loadable import as_lists, compares_with_references
from eval.meteor import describe, meteor

CITATION = "Lavie and Agarwal, WMT 2007"


class Meteor(evaluate.Metric):  # type: ignore[misc]
    """As in `eval.meteor`, from the root of the repository."""

    def _info(self) -> evaluate.MetricInfo:
        return compares_with_references(describe(), CITATION)

    def _compute(self, predictions: list[str], references: list[str] | list[list[str]]) -> dict[str, Any]:
        return {"meteor": meteor(predictions, as_lists(references)).value}
