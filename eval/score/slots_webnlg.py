"""Slot errors of WebNLG outputs: subjects and objects of triples that an output doesn't mention.

The slot error rate follows Wen et al., "Semantically Conditioned LSTM-based Natural Language Generation for Spoken
Dialogue Systems" (EMNLP 2015); the matching of names is our own.
"""

import re
from collections.abc import Collection, Sequence

from data.slots import SlotErrors
from data.webnlg import DATE, PLACEHOLDER, Triple, folded, spoken

# Function words, which don't identify a name.
_FUNCTION_WORDS = frozenset(
    ["a", "an", "and", "at", "by", "de", "for", "in", "is", "la", "le", "of", "on", "or", "the", "to"]
)
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_WORD = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+")
# Names that people usually write differently.
_ALIASES = {
    "united states": {"us", "usa", "america", "american", "americans"},
    "united kingdom": {"uk", "britain", "british"},
}


def name_errors(text: str, triples: Sequence[Triple]) -> SlotErrors:
    """Check an output against the distinct subjects and objects of its triples.

    A name is missing if the output has less than half of its words, in any order. A date needs its year and month; a
    number its value or the nearest integer. The relations between names and additional statements aren't checked, so
    only an unfilled placeholder is `added`.
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
    wanted = _identifying(_words(without_remark)) or _words(spoken(name))
    if _ALIASES.get(" ".join(wanted), set()) & set(words):
        return True
    found = sum(any(_same(word, other) for other in words) for word in wanted)
    return 2 * found >= len(wanted)


def _identifying(words: Sequence[str]) -> list[str]:
    """The words that identify a name: without function words and initials, if any others are left."""
    identifying = [word for word in words if word not in _FUNCTION_WORDS]
    return [word for word in identifying if len(word) > 1 or word.isdigit()] or identifying


def _words(text: str) -> list[str]:
    """Words and numbers in folded case, with `U.S.` and `1,000` as single words."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", folded(text))
    text = re.sub(r"\b(?:[^\W\d_]\.){2,}(?:[^\W\d_]\b)?", lambda match: match[0].replace(".", "") + " ", text)
    return _WORD.findall(text)


def _same(word: str, other: str) -> bool:
    """Whether two words have the same stem ("Italy", "Italian"), or two numbers the same value."""
    if word == other:
        return True
    if word[0].isdigit() or other[0].isdigit():
        if not (word[0].isdigit() and other[0].isdigit()):
            return False
        return float(other) in (float(word), round(float(word)))
    shared = next((n for n, (a, b) in enumerate(zip(word, other, strict=False)) if a != b), min(len(word), len(other)))
    shorter, longer = sorted((len(word), len(other)))
    return shared >= 4 and (shared >= shorter - 1 or shared >= 0.6 * longer)
