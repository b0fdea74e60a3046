"""Slot errors of ViGGO outputs: slots that are missing, wrong or added.

Slots are matched by patterns, as the authors of the data set do (Juraska, Bowden and Walker, INLG 2019); the patterns
here are our own.
"""

import re
from collections.abc import Mapping

from data.placeholders import placeholder
from data.slots import SlotErrors
from data.viggo import SLOTS, Meaning

# Patterns that mention a slot with the values yes and no.
_MENTIONS = {
    "has_multiplayer": r"\bmulti(?:ple)?[- ]?player|\bsingle[- ]?player|\bco-?op|\bsolo\b|\balone\b|\bfriends?\b|"
    r"\bonline\b|\b(?:by|on) (?:my|your)(?:self| own)\b|\bwith others\b|\bother (?:players|people)\b"
    r"|\bmultiple players\b",
    "available_on_steam": r"\bsteam\b",
    "has_linux_release": r"\blinux\b",
    "has_mac_release": r"\bmacs?\b|\bmac ?os|\bmacintosh|\bos x\b",
}
_ALONE = re.compile(r"single|solo|alone|self|own", re.IGNORECASE)
_NOT = re.compile(
    r"\b(?:no|not|non|never|nor|neither|without|lack\w*|cannot|unavailable|exclud\w+|miss\w+|\w+n['’]t)\b", re.I
)
_NOT_AFTER = re.compile(
    r"^(?: (?:release|version|support|mode|is|are|was|were|do|does|did|has|have))*(?: not\b|n['’]t\b)", re.I
)
# A pronoun as the subject starts a clause; as the object ("you can't get it on Steam") it does not.
_SUBJECT = r"(?:it|this|you)(?=['’]|\s+(?:is|was|has|can|does|do|will|won|runs?|supports?|should|could|may|might)\b)"
_CLAUSE = re.compile(rf"[.!?;]|\b(?:(?:but|though|however|yet|while|and (?:it|is|can))\b|{_SUBJECT})", re.I)
# Patterns that state a value of slots with several values and of age ratings; (?i:…) ignores case.
_VALUES = {
    "player_perspective": {
        "first person": r"(?i:\b(?:first|1st)\b|\bfps\b)",
        "third person": r"(?i:\b(?:third|3rd)\b)",
        "bird view": r"(?i:\bbird|\btop[- ]?down|\boverhead)",
        "side view": r"(?i:\bside\b|\bside-?scroll)",
    },
    "platforms": {
        "PlayStation": r"(?i:\bplay ?station|\bps ?[1-5]?\b)",
        "Xbox": r"(?i:\bx-?box)",
        "Nintendo": r"(?i:\bnintendo)",
        "Nintendo Switch": r"\bSwitch\b",
        "PC": r"(?i:\bpcs?\b|\bcomputers?\b|\bwindows\b)",
    },
    "esrb": {
        "M (for Mature)": r"\bM\b|(?i:\bmatur|\badult|\b17\b)",
        "T (for Teen)": r"\bT\b|(?i:\bteen)",
        "E (for Everyone)": r"\bE\b(?! ?10)|(?i:\beveryone\b(?! 10)|\ball (?:ages?|audiences)|\bfamil|\bkid|\bchild)",
        "E 10+ (for Everyone 10 and Older)": r"\bE ?10|(?i:\b10\b|\bten\b)",
    },
    "genres": {
        "action": r"(?i:\baction)",
        "action-adventure": r"(?i:\baction\b.*\badventur|\badventur.*\baction\b)",
        "adventure": r"(?i:\badventur)",
        "arcade": r"(?i:\barcade)",
        "driving/racing": r"(?i:\bdriv|\brac(?:ing|er|e)\b)",
        "fighting": r"(?i:\bfight)",
        "hack-and-slash": r"(?i:\bhack)",
        "indie": r"(?i:\bindie|\bindependent)",
        "MMORPG": r"(?i:\bmmorpg|\bmassively)",
        "music": r"(?i:\bmusic|\brhythm)",
        "platformer": r"(?i:\bplatform(?:er|ing))",
        "point-and-click": r"(?i:\bpoint[- ](?:and|&|n)[- ]click)",
        "puzzle": r"(?i:\bpuzzl)",
        "real-time strategy": r"(?i:\breal[- ]?time|\brts\b)",
        "role-playing": r"(?i:\brole[- ]?play|\bj?rpg)",
        "shooter": r"(?i:\bshoot|\bfps\b)",
        "simulation": r"(?i:\bsimulat|\bsim\b)",
        "sport": r"(?i:\bsport)",
        "strategy": r"(?i:\bstrateg)",
        "tactical": r"(?i:\btactic)",
        "text adventure": r"(?i:\btext)",
        "trivia/board game": r"(?i:\btrivia|\bboard)",
        "turn-based strategy": r"(?i:\bturn[- ]based|\btbs\b)",
        "vehicular combat": r"(?i:\bvehic.*\bcombat|\bcombat.*\bvehic|\bcar combat)",
    },
}
# Stricter patterns for values that the meaning representation doesn't contain.
_ADDED = {
    "player_perspective": {
        "first person": r"(?i:\b(?:first|1st)[- ]person)",
        "third person": r"(?i:\b(?:third|3rd)[- ]person)",
        "bird view": r"(?i:\bbird)",
        "side view": r"(?i:\bside[- ](?:view|scroll))",
    },
    "platforms": {
        "PlayStation": r"(?i:\bplay ?station)",
        "Xbox": r"(?i:\bx-?box)",
        "Nintendo": r"\bNintendo\b(?! Switch)",
        "Nintendo Switch": r"\bNintendo Switch\b",
        "PC": r"\bPCs?\b",
    },
}
_ADDED_AGE = re.compile(r"\b[EMT][- ]rated|\brated [EMT]\b|\(for (?:Mature|Teen|Everyone)")
_ADDED_YEAR = re.compile(r"\b(?:19|20)\d\d\b")


def act_errors(text: str, meaning: Meaning) -> SlotErrors:
    """Check an output against the slots of its dialogue act.

    Values are matched literally or by the patterns above; all values of a slot must be stated. Ratings aren't checked,
    since any words may give an opinion, nor are slots without a value. For yes and no, a wrong value counts in inform
    acts; in other acts (`do you dislike Linux games?`) the slot only has to be mentioned. The names of the game and the
    developer don't state other slots.
    """
    slots = meaning.slots
    rest = text
    for slot in ("name", "developer"):
        rest = re.sub(_own_words(slots[slot]), " ", rest) if slots.get(slot) else rest
    missing, wrong = [], []
    for slot, value in slots.items():
        searched = text if slot in ("name", "developer") else rest
        if slot in _MENTIONS:
            said = _answers(slot, searched)
            if not said:
                missing.append(slot)
            elif value and value not in said and meaning.act == "inform":
                wrong.append(slot)
        elif value and slot != "rating" and not _states(slot, value, searched):
            missing.append(slot)
    added = [slot for slot in SLOTS if placeholder(slot) in rest or _adds(slot, slots, rest)]
    return SlotErrors(len(slots), missing=tuple(missing), wrong=tuple(wrong), added=tuple(added))


def _states(slot: str, value: str, text: str) -> bool:
    patterns = _VALUES.get(slot)
    if patterns is None:
        return bool(re.search(_own_words(value), text))
    values = [value] if slot == "esrb" else value.split(", ")
    return all(re.search(patterns.get(each) or _own_words(each), text) for each in values)


def _answers(slot: str, text: str) -> set[str]:
    """The values (`yes`, `no`) that a text states for a slot; a negation in the same clause means no."""
    found = set()
    for match in re.finditer(_MENTIONS[slot], text, re.IGNORECASE):
        before = _CLAUSE.split(text[: match.start()])[-1]
        denied = _NOT.search(before) or _NOT_AFTER.search(text[match.end() :])
        found.add("no" if denied or _ALONE.search(match[0]) else "yes")
    return found


def _adds(slot: str, slots: Mapping[str, str], text: str) -> bool:
    """Whether a text states a slot that the act doesn't have, or an additional value of a slot with several."""
    if slot in _ADDED and slots.get(slot) != "":
        right = slots.get(slot, "").split(", ")
        also = ["Nintendo"] if "Nintendo Switch" in right else []
        others = [pattern for value, pattern in _ADDED[slot].items() if value not in [*right, *also]]
        return any(re.search(pattern, text) for pattern in others)
    if slot in slots:
        return False
    if slot == "has_multiplayer":
        return bool(re.search(r"(?i:\b(?:multi|single)[- ]?player)", text)) and "MMORPG" not in slots.get("genres", "")
    if slot in _MENTIONS:
        return bool(re.search(_MENTIONS[slot], text, re.IGNORECASE))
    if slot == "esrb":
        return bool(_ADDED_AGE.search(text))
    return slot == "release_year" and "exp_release_date" not in slots and bool(_ADDED_YEAR.search(text))


def _own_words(value: str) -> str:
    """A pattern that matches a value literally, ignoring case and spacing."""
    pieces = r"[\s-]*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", value)))
    return rf"(?i:(?<!\w){pieces}(?!\w))"
