"""Error messages for invalid requests: they name the field, its value, and what is allowed."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_MAX_SHOWN = 60  # characters of a value that a message repeats
# By the type of pydantic's error. Its own messages name Python's types, where these name those of JSON.
_EXPECTED = {
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


def show_value(value: Any) -> str:
    """A JSON value in the form that messages show: itself, or its type for a list or an object.

    >>> show_value(None), show_value("a"), show_value([]), show_value([1, 2]), show_value({"a": 1})
    ('null', '"a"', '[]', 'a list', 'an object')
    """
    if isinstance(value, list | dict) and value:
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def field_error(error: Mapping[str, Any]) -> tuple[str, str | None]:
    """The message for one of pydantic's errors about a request's body, and the name of the field that is wrong."""
    # "[key]" says that a key of an object is wrong; it is no part of the field's name.
    field = ".".join(str(part) for part in error["loc"][1:] if part != "[key]") or None
    where, kind, message = field or "the body", error["type"], str(error["msg"])
    if kind == "missing":
        return f"{where} is missing" if field else "the body is empty: it must be a JSON object", field
    if kind == "extra_forbidden":
        return f"{where} is not a known field", field
    if kind == "value_error":  # raised by a validator of this package
        return f"{where}: {message.removeprefix('Value error, ')}", field
    expected = _EXPECTED.get(kind) or re.sub("^(Input|String|List|Value) should", "it must", message)
    return f"{where} is {show_value(error['input'])}: {expected}", field


def unknown_field(name: str, known: Iterable[str], endpoints: Mapping[str, Iterable[str]]) -> str:
    """The message for an unknown field. `endpoints` holds the fields of each endpoint, for the hint."""
    hints = [f"it belongs to {endpoint}" for endpoint, names in endpoints.items() if name in names]
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = hints[0] if hints else f"did you mean {near[0]}?" if near else ""
    return f"{name} is not a known field{': ' if hint else ''}{hint}"
