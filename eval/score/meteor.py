"""METEOR (Lavie and Agarwal, WMT 2007) by nltk."""

from collections.abc import Sequence
from importlib import metadata
from typing import Any

from eval.score.metric import Metric, Statistics, Texts, mean_of
from eval.score.tokenizers import english_obstacle
from eval.score.words import words


def meteor(predictions: Sequence[str], references: Sequence[Sequence[str]], wordnet: Any = None) -> Statistics:
    """METEOR from 0 to 100: the mean over predictions of the best reference; words match exactly, by stem or as
    synonyms.

    Args:
        wordnet: a reader of WordNet; None: what is installed.

    Raises NotAvailableError where no WordNet is: without its synonyms it would be another metric.
    """
    from nltk.translate.meteor_score import meteor_score  # here: nltk takes a second

    from eval.score.wordnet import installed_wordnet

    reader = wordnet if wordnet is not None else installed_wordnet()
    scores = [
        meteor_score([words(reference) for reference in texts], words(text), wordnet=reader)
        for text, texts in zip(predictions, references, strict=True)
    ]
    return mean_of(scores, scale=100)


def _obstacle(texts: Texts) -> str | None:
    if obstacle := english_obstacle(texts.right, "its stems and synonyms are"):
        return obstacle
    return None if any(words(text) for text in texts.right) else "the references have no words"


def _describe(texts: Texts) -> str:
    return f"nltk {metadata.version('nltk')} (exact, stem and WordNet; not METEOR 1.5), 13a tokens, best reference"


METEOR = Metric(
    "meteor",
    "METEOR",
    "Lavie and Agarwal, WMT 2007",
    lambda texts: meteor(texts.predictions, texts.references),
    _describe,
    _obstacle,
)
