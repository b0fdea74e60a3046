"""Exact match: how many outputs have the result of the reference, such as the number of a worked answer."""

import json
from collections.abc import Sequence
from typing import Any

from data.chat import result_of
from eval.score.metric import Metric, NotAvailableError, Statistics, Texts, mean_of

_MISSING = (
    "it needs a result in every reference: set the option answer_after of the task chat to the text before the results"
)


def exact_match(predictions: Sequence[str], meanings: Sequence[str]) -> Statistics:
    """The share of outputs with the expected result, in percent.

    Args:
        predictions: the output of each item.
        meanings: for each item, the expected `result` and the text before it (`answer_after`), as a JSON object.

    Raises:
        NotAvailableError: for an item without an expected result.
    """
    expected = [_expected(meaning) for meaning in meanings]
    pairs = zip(predictions, expected, strict=True)
    return mean_of([result_of(text, item["answer_after"]) == item["result"] for text, item in pairs], scale=100)


def _expected(meaning: str) -> dict[str, Any]:
    try:
        values = json.loads(meaning)
        return {name: str(values[name]) for name in ("answer_after", "result")}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise NotAvailableError(_MISSING) from error


def _compute(texts: Texts) -> Statistics:
    if texts.meanings is None:
        raise NotAvailableError(_MISSING)
    return exact_match(texts.predictions, texts.meanings)


EXACT_MATCH = Metric(
    "exact_match",
    "EM",
    "Cobbe et al., 2021 (arXiv 2110.14168)",
    _compute,
    lambda texts: "results equal to the reference's without whitespace and commas, percent of all items",
    long_label="exact match of the result",
    against="meanings",
    in_short_table=True,
    adds_up=True,
)
