"""How metrics are called and shown."""

from collections.abc import Iterable
from dataclasses import dataclass

_LABELS = {
    "bleu": "BLEU",
    "nist": "NIST",
    "meteor": "METEOR",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "cider": "CIDEr",
    "bertscore": "BERTScore F1",
    "slot_error_rate": "slot error rate",
}
_LOWER_IS_BETTER = {"slot_error_rate"}


@dataclass(frozen=True)
class Metric:
    """A metric of a comparison: its name in the reports, what it is called, and decimals enough to tell rows apart."""

    name: str
    label: str
    lower_is_better: bool
    decimals: int

    @classmethod
    def of(cls, name: str, values: Iterable[float]) -> "Metric":
        """The metric of these values; one that isn't known here goes by its name, and higher is better."""
        decimals = 2 if max(map(abs, values), default=0.0) >= 10 else 3
        return cls(name, _LABELS.get(name, name), name in _LOWER_IS_BETTER, decimals)

    def show(self, value: float) -> str:
        """A value as the page writes it."""
        return f"{value:.{self.decimals}f}"
