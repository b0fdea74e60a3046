"""NIST for `evaluate`: `evaluate.load("eval/metrics/nist")`."""

from typing import Any

import evaluate

from eval.loadable import as_lists, compares_with_references
from eval.nist import describe, nist

CITATION = "Doddington, HLT 2002"


class Nist(evaluate.Metric):  # type: ignore[misc]
    """As in `eval.nist`, from the root of the repository."""

    def _info(self) -> evaluate.MetricInfo:
        return compares_with_references(describe(), CITATION)

    def _compute(self, predictions: list[str], references: list[str] | list[list[str]]) -> dict[str, Any]:
        return {"nist": nist(predictions, as_lists(references)).value}
