"""CIDEr-D for `evaluate`: `evaluate.load("eval/metrics/cider")`."""

from typing import Any

import evaluate

from eval.cider import cider, describe
from eval.loadable import as_lists, compares_with_references

CITATION = "Vedantam, Zitnick and Parikh, CVPR 2015"


class Cider(evaluate.Metric):  # type: ignore[misc]
    """As in `eval.cider`, from the root of the repository."""

    def _info(self) -> evaluate.MetricInfo:
        return compares_with_references(describe(), CITATION)

    def _compute(self, predictions: list[str], references: list[str] | list[list[str]]) -> dict[str, Any]:
        return {"cider": cider(predictions, as_lists(references)).value}
