"""The slot error rate (SER): slots of the meaning representation that an output misses, gets wrong, repeats or adds.

Slots are matched by task-specific patterns: `data.e2e_slots`, `slots_viggo`, `slots_webnlg`.
"""

import unicodedata
from collections.abc import Sequence

import numpy as np

from data.e2e import read_meaning
from data.e2e_slots import slot_errors
from data.slots import SlotErrors
from data.viggo import is_act, parse_act
from data.webnlg import read_triples
from eval.score.metric import Array, Metric, NotAvailableError, Statistics, Texts
from eval.score.slots_viggo import act_errors
from eval.score.slots_webnlg import name_errors
from eval.score.tokenizers import english_obstacle
from skipdecode.errors import ConfigError


def slot_error_rate(predictions: Sequence[str], meanings: Sequence[str]) -> Statistics:
    """Errors per 100 slots of the meaning representations: 0 where every slot is stated and none is added.

    Args:
        predictions: the prediction of each item.
        meanings: for each prediction, a meaning representation or prompt of E2E (`data.e2e.read_meaning`), a meaning
            representation of ViGGO, or triples of WebNLG, one per line.

    Raises NotAvailableError for anything else.
    """
    items = []
    for number, (text, meaning) in enumerate(zip(predictions, meanings, strict=True)):
        try:
            errors = _errors(text, meaning)
        except ConfigError as error:
            raise NotAvailableError(
                f"item {number + 1} has no meaning representation ({error}): add the field `meaning`"
            ) from error
        items.append([errors.count, errors.slots])
    return Statistics(np.array(items, dtype=np.float64), _rate)


def _errors(text: str, meaning: str) -> SlotErrors:
    """The slot errors of a text, by the notation of the meaning; accents and apostrophes are normalized."""
    text, meaning = (unicodedata.normalize("NFC", each).replace("’", "'") for each in (text, meaning))
    if triples := read_triples(meaning):
        return name_errors(text, triples)
    if is_act(meaning):
        return act_errors(text, parse_act(meaning))
    return slot_errors(text, read_meaning(meaning))


def _describe(texts: Texts) -> str:
    if texts.meanings and read_triples(texts.meanings[0]):
        return "slot error rate: subjects and objects of triples not found in the output, percent of all"
    return "slot error rate: missing, wrong, repeated or added slots, percent of all slots, matched by patterns"


def _rate(sums: Array) -> float:
    return float(100 * sums[0] / sums[1])


def _compute(texts: Texts) -> Statistics:
    if texts.meanings is None:
        raise NotAvailableError("it needs meaning representations, as in the tasks e2e, viggo and webnlg")
    return slot_error_rate(texts.predictions, texts.meanings)


SLOT_ERROR_RATE = Metric(
    "slot_error_rate",
    "SER",
    "Dušek, Howcroft and Rieser, INLG 2019",
    _compute,
    _describe,
    lambda texts: english_obstacle(texts.expected, "its patterns are"),
    long_label="slot error rate",
    against="meanings",
    in_short_table=True,
    lower_is_better=True,
    decimals=3,
)
