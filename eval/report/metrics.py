"""How metrics are shown."""

from collections.abc import Iterable
from dataclasses import dataclass

from eval.results import LABELS

_LONG = {"slot_error_rate": "slot error rate"}  # where there is room to say what a label is short for
_LOWER_IS_BETTER = {"slot_error_rate"}


@dataclass(frozen=True)
class Metric:
    """A metric of a comparison: its name in the reports, what it is called, and decimals enough to tell rows apart."""

    name: str
    label: str
    long_label: str
    lower_is_better: bool
    decimals: int

    @classmethod
    def of(cls, name: str, values: Iterable[float]) -> "Metric":
        """The metric of these values."""
        decimals = 2 if max(map(abs, values), default=0.0) >= 10 else 3
        return cls(name, LABELS[name], _LONG.get(name, LABELS[name]), name in _LOWER_IS_BETTER, decimals)

    def show(self, value: float) -> str:
        """A value as the page writes it."""
        return f"{value:.{self.decimals}f}"
