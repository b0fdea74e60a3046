"""The one exception that a user's mistake raises, and what raises it in many places."""

import difflib
from collections.abc import Iterable
from numbers import Integral


class ConfigError(ValueError):
    """A setting, a file or an argument that can't be used; the message says what to do instead.

    The command lines print it as one line and exit with status 2.
    """


def unknown(kind: str, value: str, allowed: Iterable[str]) -> ConfigError:
    """The error for a name that isn't one of `allowed`, with the nearest valid one where there is one.

    >>> str(unknown("decay", "linaer", ["linear", "cosine"]))
    "unknown decay 'linaer': did you mean 'linear'? Allowed: cosine, linear"
    """
    names = sorted(allowed)
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"unknown {kind} {value!r}: {hint}Allowed: {', '.join(names)}")


def check_counts(**counts: int) -> None:
    """Raise ConfigError where one is no integer of at least 1; those of numpy are integers too."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
            raise ConfigError(f"{name} is {value!r}: it must be an integer of at least 1")


def first_line(error: BaseException) -> str:
    """Another library's message on one line, for the message of a ConfigError."""
    return " ".join(str(error).split())[:300] or type(error).__name__
