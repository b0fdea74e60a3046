"""Subjects and objects of WebNLG's triples that a text doesn't name.

The share of what is to be said that is missing, as the slot error rate of Wen et al., "Semantically Conditioned
LSTM-based Natural Language Generation for Spoken Dialogue Systems" (EMNLP 2015), counts it; what states a name is this
file's own.
"""

import re
from collections.abc import Collection, Sequence

from data.webnlg import DATE, PLACEHOLDER, Triple, folded, spoken
from eval.score.slots import SlotErrors

# Function words, which say nothing of whether a name was meant.
_SMALL = frozenset(["a", "an", "and", "at", "by", "de", "for", "in", "is", "la", "le", "of", "on", "or", "the", "to"])
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_WORD = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+")
# Names that people nearly always write otherwise.
_OTHERWISE = {
    "united states": {"us", "usa", "america", "american", "americans"},
    "united kingdom": {"uk", "britain", "british"},
}


def name_errors(text: str, triples: Sequence[Triple]) -> SlotErrors:
    """Check a text against the distinct subjects and objects of its triples.

    A name is missing where the text has less than half of its words, in whatever order. A date is there with its year
    and its month; a number with its value or the nearest integer. Whether the names are put together rightly isn't
    checked, nor what is said of anything else, so that only a placeholder that nothing was put back for is `added`.
    """
    words = set(_words(text))
    names = dict.fromkeys(name for subject, _, value in triples for name in (subject, value))
    missing = tuple(name for name in names if not _is_named(name, words))
    return SlotErrors(len(names), missing=missing, added=tuple(sorted(set(PLACEHOLDER.findall(text)))))


def _is_named(name: str, words: Collection[str]) -> bool:
    date = DATE.fullmatch(spoken(name))
    if date is not None:
        month = int(date[2])
        months = {word[:3] for word in words if word.isalpha()}
        return date[1] in words and (_MONTHS[month - 1] in months or bool({str(month), date[2]} & set(words)))
    without_remark = re.sub(r"\(.*?\)", " ", spoken(name))
    wanted = _telling(_words(without_remark)) or _words(spoken(name))
    if _OTHERWISE.get(" ".join(wanted), set()) & set(words):
        return True
    found = sum(any(_same(word, other) for other in words) for word in wanted)
    return 2 * found >= len(wanted)


def _telling(words: Sequence[str]) -> list[str]:
    """The words that tell a name from others: no function words and no initials, if there is anything else."""
    telling = [word for word in words if word not in _SMALL]
    return [word for word in telling if len(word) > 1 or word.isdigit()] or telling


def _words(text: str) -> list[str]:
    """Words and numbers, folded, with `U.S.` and `1,000` in one piece."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", folded(text))
    text = re.sub(r"\b(?:[^\W\d_]\.){2,}(?:[^\W\d_]\b)?", lambda match: match[0].replace(".", "") + " ", text)
    return _WORD.findall(text)


def _same(word: str, other: str) -> bool:
    """Say whether two words are one, whatever their endings ("Italy", "Italian"), or two numbers of one value."""
    if word == other:
        return True
    if word[0].isdigit() or other[0].isdigit():
        if not (word[0].isdigit() and other[0].isdigit()):
            return False
        return float(other) in (float(word), round(float(word)))
    shared = next((n for n, (a, b) in enumerate(zip(word, other, strict=False)) if a != b), min(len(word), len(other)))
    shorter, longer = sorted((len(word), len(other)))
    return shared >= 4 and (shared >= shorter - 1 or shared >= 0.6 * longer)
