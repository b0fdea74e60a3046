"""What the modules in eval/metrics/ tell `evaluate` of themselves.

`evaluate.load("eval/metrics/bleu")` copies the one file elsewhere and imports it from there, so the arithmetic stays in
this package, which it finds from the repository's root.
"""

import datasets
import evaluate

_TEXT = datasets.Value("string")
_PREDICTIONS = "predictions: a list of texts.\n"


def compares_with_references(description: str, citation: str) -> evaluate.MetricInfo:
    """A metric of predictions and references: a list of texts for each item, or one text."""
    return evaluate.MetricInfo(
        description=description,
        citation=citation,
        inputs_description=_PREDICTIONS + "references: for each of them a list of texts, or one text.\n",
        features=[
            datasets.Features({"predictions": _TEXT, "references": datasets.Sequence(_TEXT)}),
            datasets.Features({"predictions": _TEXT, "references": _TEXT}),
        ],
    )


def compares_with_meanings(description: str, citation: str) -> evaluate.MetricInfo:
    """A metric of predictions and what each of them must state."""
    return evaluate.MetricInfo(
        description=description,
        citation=citation,
        inputs_description=_PREDICTIONS
        + "references: a meaning representation for each, such as name[Aromi], food[Italian].\n",
        features=datasets.Features({"predictions": _TEXT, "references": _TEXT}),
    )


def as_lists(references: list[str] | list[list[str]]) -> list[list[str]]:
    """References as one list for each prediction, however they were given."""
    return [[texts] if isinstance(texts, str) else texts for texts in references]
