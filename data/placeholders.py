"""Placeholders for values: a model from random weights can't write names that it never saw, but it can copy a token."""

import re
from collections.abc import Mapping, Sequence

from skipdecode.errors import ConfigError, unknown

_WANTS_AN = re.compile(r"(?!uni|eu)[aeiou]", re.IGNORECASE)  # "a United States senator", "a European"


def check_slots(delexicalise: Sequence[str], slots: Sequence[str]) -> tuple[str, ...]:
    """The option `delexicalise` of a task that has these slots. Raises ConfigError for another, or one named twice."""
    for slot in delexicalise:
        if slot not in slots:
            raise unknown("slot in delexicalise", slot, slots)
    if len(set(delexicalise)) != len(delexicalise):
        raise ConfigError(f"delexicalise is {list(delexicalise)}: name each slot once")
    return tuple(delexicalise)


def placeholder(slot: str) -> str:
    """The placeholder of a slot's value: letters alone, so that a tokenizer trained on it learns it as one token."""
    return f"X{slot}"


def hide(text: str, values: Mapping[str, str]) -> str:
    """`text` with each value replaced by its slot's placeholder; longer values first, as one may contain another."""
    for slot, value in sorted(values.items(), key=lambda item: len(item[1]), reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", placeholder(slot), text, flags=re.IGNORECASE)
    return text


def put_back(text: str, substitutions: Sequence[tuple[str, str]]) -> str:
    """The words that placeholders stand for, with a/an set right, and one full stop where a value ends in its own."""
    for hidden, value in substitutions:
        article = "an" if _WANTS_AN.match(value) else "a"
        text = re.sub(rf"\b([Aa])n? (?={hidden})", rf"\g<1>{article[1:]} ", text)
        text = text.replace(f"{hidden}.", value) if value.endswith(".") else text
        text = text.replace(hidden, value)
    return text


def capitals(text: str) -> str:
    """The text without blanks around it, its sentences starting in capitals."""
    return re.sub(r"(^|[.!?] )([a-z])", lambda m: m[1] + m[2].upper(), text.strip())
