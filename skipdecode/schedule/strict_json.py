"""Strict parsing of JSON from users, where every fault is a ConfigError."""

import json
from collections.abc import Sequence
from typing import Any

from skipdecode.errors import ConfigError


def parse_json(text: str) -> Any:
    """Parse a JSON text.

    Raises ConfigError, with a message of one line, where the text isn't JSON, including NaN and Infinity, a repeated
    key in an object, an integer of thousands of digits, and nesting that is too deep to read.

    >>> parse_json('{"speed": NaN}')
    Traceback (most recent call last):
        ...
    skipdecode.errors.ConfigError: NaN is not a JSON number
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_distinct)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except RecursionError as error:
        raise ConfigError("it is nested too deeply") from error


def _refuse_constant(name: str) -> float:
    raise ConfigError(f"{name} is not a JSON number")


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ConfigError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice in one object")
    return values
