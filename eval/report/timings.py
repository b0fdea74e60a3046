"""Timings of a row at several batch sizes, where an evaluation has measured them.

They are read by their names, whatever they are: an evaluation may time more than this page knows of.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from eval.results import Row


@dataclass(frozen=True)
class Timing:
    """One batch size.

    Attributes:
        figures: name -> value, or several: a median and its quartiles.
    """

    batch_size: int
    figures: dict[str, tuple[float, ...]]


def timings_of(row: Row) -> tuple[Timing, ...]:
    """The row's `timings`: entries with a `batch_size`, or a mapping from it to entries; none for a row without."""
    found: Any = getattr(row, "timings", None) or ()
    entries: Iterable[Any] = found
    if isinstance(found, Mapping):
        entries = [{**_fields(entry), "batch_size": int(size)} for size, entry in found.items()]
    timings = []
    for entry in entries:
        fields = _fields(entry)
        if "batch_size" in fields:
            figures = {name: _numbers(value) for name, value in fields.items() if name != "batch_size"}
            timings.append(Timing(int(fields["batch_size"]), {name: n for name, n in figures.items() if n}))
    return tuple(sorted(timings, key=lambda timing: timing.batch_size))


def _fields(entry: Any) -> dict[str, Any]:
    if is_dataclass(entry) and not isinstance(entry, type):
        return asdict(entry)
    return {str(name): value for name, value in entry.items()} if isinstance(entry, Mapping) else {}


def _numbers(value: Any) -> tuple[float, ...]:
    if isinstance(value, Mapping):
        value = [*value.values()]
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(v for v in values if isinstance(v, int | float) and not isinstance(v, bool))
