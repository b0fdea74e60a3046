"""BERTScore for `evaluate`: `evaluate.load("eval/metrics/bertscore")`."""

from typing import Any

import evaluate

from eval.bertscore import BertModel, bertscore, load_scorer
from eval.loadable import as_lists, compares_with_references

CITATION = "Zhang et al., ICLR 2020"


class BertScore(evaluate.Metric):  # type: ignore[misc]
    """As in `eval.bertscore`, from the root of the repository."""

    def _info(self) -> evaluate.MetricInfo:
        return compares_with_references("bert-score, F1 of the best reference", CITATION)

    def _compute(
        self,
        predictions: list[str],
        references: list[str] | list[list[str]],
        model: str = "roberta-large",
        layers: int | None = None,
    ) -> dict[str, Any]:
        """`model`: a folder or a Hub name; `layers`: None takes bert-score's for that name."""
        bert = BertModel(model, layers)
        value = bertscore(predictions, as_lists(references), bert).value
        return {"bertscore": value, "model": model, "layer": load_scorer(bert).num_layers}
