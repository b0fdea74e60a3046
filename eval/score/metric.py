"""Metrics, and the per-item statistics whose sums determine their scores."""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data.task import Convention

Array = NDArray[np.float64]


class NotAvailableError(Exception):
    """A metric can't be computed; the message says why and how to change that."""


@dataclass(frozen=True)
class Statistics:
    """The contribution of each item of a test set to a corpus-level score.

    Attributes:
        items: statistics, [items, columns].
        score: computes the score from the sums over items, [columns].
    """

    items: Array
    score: Callable[[Array], float]

    @property
    def value(self) -> float:
        """The score over all items."""
        return self.score(self.items.sum(axis=0))


def mean_of(scores: Sequence[float], scale: float = 1.0) -> Statistics:
    """A score that is the mean of the items' scores, times `scale`."""
    items = np.array([[scale * score, 1.0] for score in scores])  # [items, 2]
    return Statistics(items, lambda sums: float(sums[0] / sums[1]))


@dataclass(frozen=True)
class BertModel:
    """The model whose hidden states BERTScore compares.

    Attributes:
        name: a folder, or a name on the Hub.
        layers: the layer whose hidden states are used; None: the choice of bert-score for that name.
    """

    name: str
    layers: int | None = None


@dataclass(frozen=True)
class Texts:
    """Predictions and everything that they are scored against, normalized to Unicode NFC.

    Attributes:
        predictions: the prediction of each item.
        references: the references of each item.
        meanings: the meaning representation of each item; None where the task has none.
        bert: the model of BERTScore; None without BERTScore.
        convention: the rules by which BLEU tokenizes.
        tokenizer: for BLEU, NIST, ROUGE and CIDEr, a name in `eval.score.tokenizers`; None: each metric's own.
    """

    predictions: Sequence[str]
    references: Sequence[Sequence[str]]
    meanings: Sequence[str] | None = None
    bert: BertModel | None = None
    convention: Convention = "mteval"
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "predictions", _normalized(self.predictions))
        object.__setattr__(self, "references", [_normalized(texts) for texts in self.references])

    @property
    def expected(self) -> Sequence[str]:
        """All references; the predictions where there are none, as for metrics that use meaning representations."""
        return [text for texts in self.references for text in texts] if self.references else self.predictions


def _normalized(texts: Sequence[str]) -> Sequence[str]:
    return [unicodedata.normalize("NFC", text) for text in texts]


def _no_obstacle(texts: Texts) -> str | None:
    return None


@dataclass(frozen=True)
class Metric:
    """A metric with its names and functions. `eval.score.registry` lists all metrics.

    Attributes:
        name: the key in reports and on the command line.
        label: the name in tables and pictures.
        citation: the paper.
        compute: computes the statistics of texts. Raises NotAvailableError where that is impossible.
        describe: one line on what was computed, with the library and its version.
        obstacle: the reason why predictions can't be scored against these references, such as an unsupported script;
            None where they can. It depends on the references only, so it is the same for all systems.
        long_label: the label spelled out.
        against: what predictions are compared with.
        in_short_table: whether it is shown in narrow tables, model cards and trackers.
        lower_is_better: true for error rates.
        decimals: the number of decimals to show.
        adds_up: whether the statistics of an item depend on that item only, so that batches can be added up.
    """

    name: str
    label: str
    citation: str
    compute: Callable[[Texts], Statistics]
    describe: Callable[[Texts], str]
    obstacle: Callable[[Texts], str | None] = _no_obstacle
    long_label: str = ""
    against: Literal["references", "meanings"] = "references"
    in_short_table: bool = False
    lower_is_better: bool = False
    decimals: int = 2
    adds_up: bool = False

    def show(self, value: float) -> str:
        """Format a value with the decimals of the metric."""
        return f"{value:.{self.decimals}f}"

    @property
    def title(self) -> str:
        """The long label, or the label."""
        return self.long_label or self.label
