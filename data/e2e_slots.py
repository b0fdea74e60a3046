"""Slot errors of E2E outputs: slots that are missing, wrong, repeated or added.

Slots are matched by patterns after Dušek, Howcroft and Rieser, "Semantic Noise Matters for Neural NLG" (INLG 2019).
"""

import re
from collections.abc import Mapping

from data.placeholders import placeholder
from data.slots import SlotErrors

# In the order of prompts; rows may have another order.
SLOTS = ("name", "eatType", "food", "priceRange", "customer rating", "area", "familyFriendly", "near")

# Patterns that tell whether a text states a slot. The other slots are stated by their values.
MENTIONS = {
    "priceRange": re.compile(r"pric|cheap|expensiv|moderate|cost|afford|£|pound|budget", re.IGNORECASE),
    "customer rating": re.compile(r"rat(ed|ing)|star|out of|customer|review|recommend|regard|score", re.IGNORECASE),
    "area": re.compile(r"river|city|cent(re|er)|town", re.IGNORECASE),
    "familyFriendly": re.compile(r"famil|kid|child|adult|young|all ages", re.IGNORECASE),
}

_FIVE = r"\s*(?:out\s+of|of|/|-)\s*(?:5|five)\b"
_RATING = r"(?:customer\w*|rat\w+|review\w*|recommend\w*|regard\w*|scor\w+|approv\w+|reput\w+)"
_PRICE = r"(?:pric\w+|cost\w*)"
_IS = r"(?:(?!and |but |with )\w+ )?(?:is |are |of )?(?:very |quite |an? )?"
_YOUNG = r"(?:famil|kid|child|young)"
_ALLOWED = r"(?:allow|welcom|permit|recommend|suit|friendly|accept|advis)"
_NOT = r"\b(?:not?|non|never|nor|isn'?t|aren'?t|doesn'?t|don'?t|without|lacks?)\b(?! only)"
# Patterns that state a value of a slot with free wording. Values that people use interchangeably share a list, such as
# "cheap" and "less than £20". An output may also state a slot in words that no list covers.
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
# The list of each value in the data set; other values are matched literally.
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
    """Check an output against the slots of its meaning representation.

    Names, kinds of place and cuisines are matched literally, ignoring case; the other slots by the patterns above.
    The words of `name` and `near` don't state other slots: "Raja Indian Cuisine" is not a cuisine. An additional kind
    of place isn't counted, since everything is a restaurant.
    """
    rest = text
    for slot in ("name", "near"):
        rest = _without(rest, meaning.get(slot, ""))
    missing, wrong, repeated = [], [], []
    for slot, value in meaning.items():
        searched, own = text if slot in ("name", "near") else rest, _canonical(slot, value)
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
    """The values of a slot that a text states; empty for a slot whose values aren't known."""
    known = FOODS if slot == "food" else PATTERNS.get(slot, {})
    found = {value for value in known if _statements(slot, value, text)}
    return found - {"yes"} if "no" in found else found  # "no children" also matches the pattern of yes


def _canonical(slot: str, value: str) -> str:
    """The key of a value in PATTERNS; the value itself where it has none."""
    return VALUES.get(slot, {}).get(value, value)


def _statements(slot: str, value: str, text: str) -> list[str]:
    """Every match of a slot value in a text, in lower case, by its patterns or literally."""
    patterns = PATTERNS.get(slot, {}).get(value) or [_own_words(value)]
    return [match[0].lower() for pattern in patterns for match in re.finditer(pattern, text, re.IGNORECASE)]


def _without(text: str, value: str) -> str:
    return re.sub(_own_words(value), " ", text, flags=re.IGNORECASE) if value else text


def _own_words(value: str) -> str:
    """A pattern that matches a value literally, with spaces or hyphens between its words."""
    return r"(?<!\w)" + r"[\s-]+".join(map(re.escape, value.split())) + r"(?!\w)"
