"""Differences between two sets of settings, for messages."""

from collections.abc import Collection
from typing import Any


def difference(before: Any, now: Any, *, apart_from: Collection[str] = ()) -> str:
    """Describe differences of nested values, such as `optim.learning_rate was 0.001, is 0.002`; empty if equal.

    `apart_from` holds keys to ignore, such as `optim.learning_rate`, or `optim` for all keys below it.
    """
    old, new = _flat(before), _flat(now)
    compared = [key for key in {**old, **new} if not {key, key.partition(".")[0]} & set(apart_from)]
    changed = [key for key in compared if old.get(key) != new.get(key)]
    return ", ".join(f"{key} was {old.get(key)}, is {new.get(key)}" for key in changed)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    nested = [_flat(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in values.items()]
    return {key: value for part in nested for key, value in part.items()}
