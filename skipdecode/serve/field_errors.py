"""What is wrong with a request, in words for whoever sent it: the field, its value, and what is allowed."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_LONGEST = 60  # characters of a value that a message repeats
# pydantic's words are those of Python.
_WANTED = {
    "dict_type": "it must be an object",
    "model_type": "it must be an object",
    "model_attributes_type": "it must be an object",
    "int_parsing": "it must be an integer",
    "int_type": "it must be an integer",
    "float_type": "it must be a number",
    "bool_type": "it must be true or false",
    "string_type": "it must be a string",
    "list_type": "it must be a list",
    "none_required": "this server doesn't support it",
}


def shown(value: Any) -> str:
    """A value of JSON in a message: what it is where it is short, else its kind.

    >>> shown(None), shown("a"), shown([]), shown([1, 2]), shown({"a": 1})
    ('null', '"a"', '[]', 'a list', 'an object')
    """
    if isinstance(value, list | dict) and value:
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def field_error(error: Mapping[str, Any]) -> tuple[str, str | None]:
    """The message for one of pydantic's errors about a request's body, and the field that it is about."""
    # The last part of some places isn't in the request: it says that a key of an object is wrong.
    field = ".".join(str(part) for part in error["loc"][1:] if part != "[key]") or None
    where, kind, message = field or "the body", error["type"], str(error["msg"])
    if kind == "missing":
        return f"{where} is missing" if field else "the body is empty: it must be a JSON object", field
    if kind == "extra_forbidden":
        return f"{where} is no field that this server knows", field
    if kind == "value_error":  # of a validator of this package
        return f"{where}: {message.removeprefix('Value error, ')}", field
    wanted = _WANTED.get(kind) or re.sub("^(Input|String|List|Value) should", "it must", message)
    return f"{where} is {shown(error['input'])}: {wanted}", field


def unknown_field(name: str, known: Iterable[str], elsewhere: Mapping[str, Iterable[str]]) -> str:
    """The message for a field that a request may not have; `elsewhere` are other addresses and their fields."""
    hints = [f"{address} has it" for address, names in elsewhere.items() if name in names]
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = hints[0] if hints else f"did you mean {near[0]}?" if near else ""
    return f"{name} is no field that this server knows{': ' if hint else ''}{hint}"
