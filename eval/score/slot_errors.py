"""The slot error rate: facts of what is to be said that a text leaves out, gets wrong, repeats or adds.

What states a fact is each task's own: `slots_e2e`, `slots_viggo`, `slots_webnlg`.
"""

import unicodedata
from collections.abc import Sequence

import numpy as np

from data.e2e import read_meaning
from data.viggo import is_act, parse_act
from data.webnlg import read_triples
from eval.score.metric import Array, Metric, NotAvailableError, Statistics, Texts
from eval.score.slots import SlotErrors
from eval.score.slots_e2e import slot_errors
from eval.score.slots_viggo import act_errors
from eval.score.slots_webnlg import name_errors
from eval.score.tokenizers import english_obstacle
from skipdecode.errors import ConfigError


def slot_error_rate(predictions: Sequence[str], meanings: Sequence[str]) -> Statistics:
    """Errors for each 100 slots of what is to be said: 0 where every fact is stated and none is added.

    Args:
        meanings: for each prediction a meaning representation of E2E or a prompt of it, as `data.e2e.read_meaning`
            reads them, one of ViGGO, or triples of WebNLG, a line each.

    Raises NotAvailableError where one of them is none of these.
    """
    items = []
    for number, (text, meaning) in enumerate(zip(predictions, meanings, strict=True)):
        try:
            errors = _errors(text, meaning)
        except ConfigError as error:
            raise NotAvailableError(
                f"item {number + 1} has no meaning representation ({error}): give it a field `meaning`"
            ) from error
        items.append([errors.count, errors.slots])
    return Statistics(np.array(items, dtype=np.float64), _rate)


def _errors(text: str, meaning: str) -> SlotErrors:
    """The faults of a text, by the task in whose notation the meaning is; accents and apostrophes in any form."""
    text, meaning = (unicodedata.normalize("NFC", each).replace("’", "'") for each in (text, meaning))
    if triples := read_triples(meaning):
        return name_errors(text, triples)
    if is_act(meaning):
        return act_errors(text, parse_act(meaning))
    return slot_errors(text, read_meaning(meaning))


def _describe(texts: Texts) -> str:
    if texts.meanings and read_triples(texts.meanings[0]):
        return "slot error rate: subjects and objects of triples that aren't found in the text, percent of all of them"
    return "slot error rate: slots missing, wrong, repeated or added, percent of all slots, found by patterns"


def _rate(sums: Array) -> float:
    return float(100 * sums[0] / sums[1])


def _compute(texts: Texts) -> Statistics:
    if texts.meanings is None:
        raise NotAvailableError("it is for tasks with meaning representations: e2e, viggo, webnlg")
    return slot_error_rate(texts.predictions, texts.meanings)


SLOT_ERROR_RATE = Metric(
    "slot_error_rate",
    "SER",
    "Dušek, Howcroft and Rieser, INLG 2019",
    _compute,
    _describe,
    lambda texts: english_obstacle(texts.right, "its patterns are"),
    long_label="slot error rate",
    against="meanings",
    in_short_table=True,
    lower_is_better=True,
    decimals=3,
)
