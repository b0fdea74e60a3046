"""Facts of E2E's meaning representations that a text leaves out, gets wrong, repeats or adds.

By patterns, after Dušek, Howcroft and Rieser, "Semantic Noise Matters for Neural NLG" (INLG 2019).
"""

import re
from collections.abc import Mapping

from data.e2e import MENTIONS, SLOTS
from data.placeholders import placeholder
from eval.score.slots import SlotErrors

_FIVE = r"\s*(?:out\s+of|of|/|-)\s*(?:5|five)\b"
_RATING = r"(?:customer\w*|rat\w+|review\w*|recommend\w*|regard\w*|scor\w+|approv\w+|reput\w+)"
_PRICE = r"(?:pric\w+|cost\w*)"
_IS = r"(?:(?!and |but |with )\w+ )?(?:is |are |of )?(?:very |quite |an? )?"
_YOUNG = r"(?:famil|kid|child|young)"
_ALLOWED = r"(?:allow|welcom|permit|recommend|suit|friendly|accept|advis)"
_NOT = r"\b(?:not?|non|never|nor|isn'?t|aren'?t|doesn'?t|don'?t|without|lacks?)\b(?! only)"
# What states a value of a slot with open words, each a list of patterns. Values that people use for each other share a
# list: "cheap" and "less than £20" don't contradict each other. A text may state a slot in words that no list knows.
PATTERNS: dict[str, dict[str, list[str]]] = {
    "priceRange": {
        "low": [
            rf"\b(?:cheap|inexpensive)|\b(?:less than|under|below|up to) £?\s*20\b|\blow\w*[- ](?:{_PRICE}|budget)",
            rf"\b{_PRICE} {_IS}low\b",
        ],
        "middle": [
            r"\bmoderat\w+|£?20\s*(?:-|–|to|and)\s*£?\s*25",
            rf"\b(?:mid\w*|average|medium)[- ](?:range )?{_PRICE}|\b{_PRICE} {_IS}(?:average|medium)\b",
        ],
        "high": [
            r"(?<!in)(?<!not )(?<!not so )(?<!not too )expensive",
            r"\b(?:pricey|upscale)|\b(?:more than|over|above) £?\s*30",
            rf"\bhigh\w*[- ]{_PRICE}|\b{_PRICE} {_IS}high\b",
        ],
    },
    "customer rating": {
        "low": [
            rf"\b(?:1|one)(?:{_FIVE}|[- ]star)|\b(?:low\w*|poor\w*|bad\w*)[- ]{_RATING}",
            rf"\b{_RATING} {_IS}(?:low|poor)\b",
        ],
        "middle": [
            rf"\b(?:3|three)(?:{_FIVE}|[- ]star)|\baverage[- ]{_RATING}",
            rf"\b{_RATING} {_IS}average\b",
        ],
        "high": [
            rf"(?<!of )(?<!out )\b(?:5|five)(?:{_FIVE}|[- ]star)|\b(?:high\w*|excellent\w*|well|top)[- ]{_RATING}",
            rf"\b{_RATING} {_IS}(?:high|excellent)\b",
        ],
    },
    "area": {"riverside": [r"\briver"], "city centre": [r"\b(?:city|centre|center|downtown)\b"]},
    "familyFriendly": {
        "no": [
            rf"{_NOT}[^.!?]{{0,40}}?{_YOUNG}|\badults?\b",
            rf"\bun\w+ for (?:\w+ )?{_YOUNG}|\bleave (?:the |your )?{_YOUNG}",
            rf"{_YOUNG}\w*[- ]?(?:un(?:friendly|welcome|suitable)|free\b)",
            rf"{_YOUNG}[^.!?]{{0,30}}?(?:(?:not|n'?t|never) (?:be )?{_ALLOWED}|\b(?:unwelcome|discouraged|prohibited))",
        ],
        "yes": [_YOUNG],
    },
}
# The values of the data set, as one of those lists states them; a value that isn't here is one of its own.
VALUES: dict[str, dict[str, str]] = {
    "priceRange": {
        "cheap": "low",
        "less than £20": "low",
        "moderate": "middle",
        "£20-25": "middle",
        "high": "high",
        "more than £30": "high",
    },
    "customer rating": {
        "low": "low",
        "1 out of 5": "low",
        "average": "middle",
        "3 out of 5": "middle",
        "high": "high",
        "5 out of 5": "high",
    },
    "area": {"riverside": "riverside", "city centre": "city centre"},
    "familyFriendly": {"yes": "yes", "no": "no"},
}
FOODS = ("Chinese", "English", "Fast food", "French", "Indian", "Italian", "Japanese")


def slot_errors(text: str, meaning: Mapping[str, str]) -> SlotErrors:
    """Check a text against the slots of its meaning representation.

    Names, kinds of place and cuisines are stated by their own words, in any case; the other slots by the patterns of
    data/e2e.py, and a value of theirs by the patterns above. The words of `name` and `near` state nothing else: "Raja
    Indian Cuisine" is no cuisine. A kind of place that wasn't asked for isn't counted: everything here is a restaurant.
    """
    rest = text
    for slot in ("name", "near"):
        rest = _without(rest, meaning.get(slot, ""))
    missing, wrong, repeated = [], [], []
    for slot, value in meaning.items():
        searched, own = text if slot in ("name", "near") else rest, _as_stated(slot, value)
        said = _statements(slot, own, searched)
        if stated(slot, searched) - {own}:
            wrong.append(slot)
        elif len(said) > len(set(said)) and slot not in ("name", "eatType"):
            repeated.append(slot)
        elif not said and not (slot in MENTIONS and MENTIONS[slot].search(searched)):
            missing.append(slot)
    added = [slot for slot in SLOTS if slot not in meaning and (placeholder(slot) in rest or stated(slot, rest))]
    return SlotErrors(len(meaning), tuple(missing), tuple(wrong), tuple(repeated), tuple(added))


def stated(slot: str, text: str) -> set[str]:
    """The values of a slot that a text states; none of a slot whose values aren't known."""
    known = FOODS if slot == "food" else PATTERNS.get(slot, {})
    found = {value for value in known if _statements(slot, value, text)}
    return found - {"yes"} if "no" in found else found  # "no children" has the word of "children welcome"


def _as_stated(slot: str, value: str) -> str:
    """The name that PATTERNS has for a value; the value where it has none."""
    return VALUES.get(slot, {}).get(value, value)


def _statements(slot: str, value: str, text: str) -> list[str]:
    """The words, in lower case, wherever a text states a value of a slot, by its patterns or by its own words."""
    patterns = PATTERNS.get(slot, {}).get(value) or [_own_words(value)]
    return [match[0].lower() for pattern in patterns for match in re.finditer(pattern, text, re.IGNORECASE)]


def _without(text: str, value: str) -> str:
    return re.sub(_own_words(value), " ", text, flags=re.IGNORECASE) if value else text


def _own_words(value: str) -> str:
    """The pattern of a value as it is written, with blanks or hyphens between its words."""
    return r"(?<!\w)" + r"[\s-]+".join(map(re.escape, value.split())) + r"(?!\w)"
