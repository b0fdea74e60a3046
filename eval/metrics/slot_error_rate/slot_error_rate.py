"""The slot error rate of E2E NLG for `evaluate`: `evaluate.load("eval/metrics/slot_error_rate")`."""

from typing import Any

import evaluate

from eval.loadable import compares_with_meanings
from eval.slot_errors import describe, slot_error_rate

CITATION = "Dušek, Howcroft and Rieser, INLG 2019"


class SlotErrorRate(evaluate.Metric):  # type: ignore[misc]
    """As in `eval.slot_errors`, from the root of the repository."""

    def _info(self) -> evaluate.MetricInfo:
        return compares_with_meanings(describe(), CITATION)

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        return {"slot_error_rate": slot_error_rate(predictions, references).value}
