"""ConfigError, the exception for every mistake of a user, and the checks that many modules share."""

import difflib
import warnings
from collections.abc import Iterable
from numbers import Integral
from typing import Any


class ConfigError(ValueError):
    """An invalid setting, file or argument; the message names it, its value, and what is allowed.

    Commands print the message as one line and exit with status 2.
    """


def unknown(kind: str, value: str, allowed: Iterable[str]) -> ConfigError:
    """The error for a name that isn't one of `allowed`; it suggests the most similar one.

    >>> str(unknown("decay", "linaer", ["linear", "cosine"]))
    "unknown decay 'linaer': did you mean 'linear'? Allowed: cosine, linear"
    """
    names = sorted(allowed)
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"unknown {kind} {value!r}: {hint}Allowed: {', '.join(names)}")


def check_counts(**counts: int) -> None:
    """Raise ConfigError unless every argument is an integer (Python's or numpy's) of at least 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
            raise ConfigError(f"{name} is {value!r}: it must be an integer of at least 1")


def first_line(error: BaseException) -> str:
    """Another library's error message as one line, to quote in a ConfigError."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def renamed(old: str, new: str) -> property:
    """The old name of a method or an attribute: it warns, and stands for the new one until the next release."""

    def get(instance: Any) -> Any:
        warnings.warn(f"{type(instance).__name__}.{old} is deprecated: use {new}", DeprecationWarning, stacklevel=2)
        return getattr(instance, new)

    return property(get)
