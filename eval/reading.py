"""Read reports from JSON: every field is validated against its dataclass, with a one-line error."""

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

# The `__pydantic_config__` of dataclasses that are read.
AS_WRITTEN = ConfigDict(extra="forbid", allow_inf_nan=False)
# The exceptions of reading and formatting a damaged file.
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)

Kind = TypeVar("Kind")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises OSError or ValueError where it can't be read."""
    return json.loads(path.read_text(encoding="utf-8"))


def as_kind(kind: type[Kind], values: Any) -> Kind:
    """A dataclass from JSON values. Raises ValueError with the field, its value and what is allowed, on one line."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        if first["type"] == "missing":
            raise ValueError(f"{field} is missing") from error
        value = repr(first["input"])
        shown = value if len(value) <= 60 else f"{value[:60]}…"
        raise ValueError(f"{field} is {shown}: {first['msg'][0].lower()}{first['msg'][1:]}") from error


def what_is_wrong(error: BaseException) -> str:
    """The message of an exception in DAMAGED, on one line."""
    message = " ".join(str(error).split())[:300]
    return f"{message} is missing" if isinstance(error, KeyError) else message or type(error).__name__
