"""BERTScore for `evaluate`: `evaluate.load("eval/metrics/bertscore")`."""

from typing import Any

from eval.score import loadable
from eval.score.bertscore import BERTSCORE, load_scorer
from eval.score.metric import BertModel, Texts


class BertScore(loadable.Loadable):
    """As in `eval.score.bertscore`, from the root of the repository."""

    metrics = (BERTSCORE,)
    description = "bert-score, F1 of the best reference"

    def _compute(
        self,
        predictions: list[str],
        references: list[str] | list[list[str]],
        model: str = "roberta-large",
        layers: int | None = None,
    ) -> dict[str, Any]:
        """`model`: a folder or a Hub name; `layers`: None takes bert-score's for that name."""
        bert = BertModel(model, layers)
        values = loadable.values_of((BERTSCORE,), Texts(predictions, loadable.as_lists(references), bert=bert))
        return {**values, "model": model, "layer": load_scorer(bert).num_layers}
