"""Reports read back from JSON: every field of the kind that its dataclass says, or one line on what is wrong."""

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

# Of a dataclass that is read: `__pydantic_config__`.
AS_WRITTEN = ConfigDict(extra="forbid", allow_inf_nan=False)
# What reading and showing a file raise where it holds something else than was written into it.
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)

Kind = TypeVar("Kind")


def read_json(path: Path) -> Any:
    """What a file of JSON holds. Raises OSError or ValueError where it can't be read."""
    return json.loads(path.read_text(encoding="utf-8"))


def as_kind(kind: type[Kind], values: Any) -> Kind:
    """The dataclass of plain values. Raises ValueError, one line with the field, its value and what is allowed."""
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
    """One line on an exception of DAMAGED."""
    message = " ".join(str(error).split())[:300]
    return f"{message} is missing" if isinstance(error, KeyError) else message or type(error).__name__
