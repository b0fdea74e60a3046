"""Placeholders for values: a model trained from scratch can copy one token, but can't write a name it never saw."""

import re
from collections.abc import Mapping, Sequence

from skipdecode.errors import ConfigError, unknown

_WANTS_AN = re.compile(r"(?!uni|eu)[aeiou]", re.IGNORECASE)  # "a United States senator", "a European"


def check_slots(delexicalise: Sequence[str], slots: Sequence[str]) -> tuple[str, ...]:
    """Check a task's option `delexicalise`. Raises ConfigError for an unknown slot and for one that is listed twice."""
    for slot in delexicalise:
        if slot not in slots:
            raise unknown("slot in delexicalise", slot, slots)
    if len(set(delexicalise)) != len(delexicalise):
        raise ConfigError(f"delexicalise is {list(delexicalise)}: list each slot once")
    return tuple(delexicalise)


def placeholder(slot: str) -> str:
    """The placeholder for a slot's value; it has only letters, so that a trained tokenizer makes it one token."""
    return f"X{slot}"


def hide(text: str, values: Mapping[str, str]) -> str:
    """Replace each value in a text by its slot's placeholder; longer values first, since one may contain another."""
    for slot, value in sorted(values.items(), key=lambda item: len(item[1]), reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", placeholder(slot), text, flags=re.IGNORECASE)
    return text


def put_back(text: str, substitutions: Sequence[tuple[str, str]]) -> str:
    """Replace placeholders by their values, correcting a/an and the double full stop after a value that ends in one."""
    for hidden, value in substitutions:
        article = "an" if _WANTS_AN.match(value) else "a"
        text = re.sub(rf"\b([Aa])n? (?={hidden})", rf"\g<1>{article[1:]} ", text)
        text = text.replace(f"{hidden}.", value) if value.endswith(".") else text
        text = text.replace(hidden, value)
    return text


def capitals(text: str) -> str:
    """Strip a text and capitalise the first letter of each sentence."""
    return re.sub(r"(^|[.!?] )([a-z])", lambda m: m[1] + m[2].upper(), text.strip())
