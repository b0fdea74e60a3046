"""Metrics: what there is to say of one, and the statistics of each item whose sums give its score."""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data.task import Convention

Array = NDArray[np.float64]


class NotAvailableError(Exception):
    """A metric that can't be had here; the message says why, and what would change it."""


@dataclass(frozen=True)
class Statistics:
    """The share of each item of a test set in a score of the whole.

    Attributes:
        items: [items, columns].
        score: the score that the sums of the columns over items, [columns], give.
    """

    items: Array
    score: Callable[[Array], float]

    @property
    def value(self) -> float:
        """The score of all items."""
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
        layers: after how many layers the states are taken; None: as many as the library's authors chose for that name.
    """

    name: str
    layers: int | None = None


@dataclass(frozen=True)
class Texts:
    """Predictions, and what they are scored by; both in Unicode's form NFC, so that equal letters are equal.

    Attributes:
        predictions: a text for each item.
        references: for each item, the texts that it is compared with.
        meanings: for each item, what its text must state; None where the task has no meaning representations.
        bert: the model of BERTScore; None without one.
        convention: by whose rules BLEU counts words.
        tokenizer: whose words BLEU, NIST, ROUGE and CIDEr count, a name in `eval.score.tokenizers`; None: each its own.
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
    def right(self) -> Sequence[str]:
        """All references; the predictions where there are none, as of metrics that hold them against meanings."""
        return [text for texts in self.references for text in texts] if self.references else self.predictions


def _normalized(texts: Sequence[str]) -> Sequence[str]:
    return [unicodedata.normalize("NFC", text) for text in texts]


def _no_obstacle(texts: Texts) -> str | None:
    return None


@dataclass(frozen=True)
class Metric:
    """One metric: everything that tables, pictures, reports and `evaluate` know of it. `eval.score.registry` lists all.

    Attributes:
        name: its key in reports and on the command line.
        label: its name in tables and pictures.
        citation: of its paper.
        compute: the statistics of texts. Raises NotAvailableError where it can't be had.
        describe: one line on what was computed of texts, and with which version of which library.
        obstacle: why no predictions can be scored against these references, such as words that the metric doesn't know;
            None where they can. It depends on the references alone, so that it holds for every system.
        long_label: the label where there is room to spell it out.
        against: which of the texts predictions are held against.
        in_short_table: among the few that a table on the terminal, a card and a tracker have room for.
        lower_is_better: as error rates are.
        decimals: as many as tell rows apart.
        adds_up: the statistics of an item follow from its own texts, so those of batches add up.
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
        """A value with the metric's decimals."""
        return f"{value:.{self.decimals}f}"

    @property
    def title(self) -> str:
        """The long label, or the label."""
        return self.long_label or self.label
