"""BLEU for `evaluate`: `evaluate.load("eval/metrics/bleu")`."""

from typing import Any

import evaluate

from eval.bleu import bleu, describe
from eval.loadable import as_lists, compares_with_references

CITATION = "Papineni et al., ACL 2002; Post, WMT 2018 (sacrebleu)"


class Bleu(evaluate.Metric):  # type: ignore[misc]
    """As in `eval.bleu`, from the root of the repository."""

    def _info(self) -> evaluate.MetricInfo:
        return compares_with_references(describe(), CITATION)

    def _compute(self, predictions: list[str], references: list[str] | list[list[str]]) -> dict[str, Any]:
        return {"bleu": bleu(predictions, as_lists(references)).value}
