"""METEOR (Lavie and Agarwal, WMT 2007) by nltk."""

from collections.abc import Sequence
from importlib import metadata
from typing import Any

from eval.score.metric import Metric, Statistics, Texts, mean_of
from eval.score.tokenizers import english_obstacle
from eval.score.words import words


def meteor(predictions: Sequence[str], references: Sequence[Sequence[str]], wordnet: Any = None) -> Statistics:
    """METEOR from 0 to 100 with the best reference, averaged over predictions; words match exactly, by stem or as
    synonyms.

    Args:
        wordnet: a WordNet reader; None: the installed one.

    Raises NotAvailableError where WordNet isn't installed: without synonyms it would be a different metric.
    """
    from nltk.translate.meteor_score import meteor_score  # imported here: nltk takes a second

    from eval.score.wordnet import installed_wordnet

    reader = wordnet if wordnet is not None else installed_wordnet()
    scores = [
        meteor_score([words(reference) for reference in texts], words(text), wordnet=reader)
        for text, texts in zip(predictions, references, strict=True)
    ]
    return mean_of(scores, scale=100)


def _obstacle(texts: Texts) -> str | None:
    if obstacle := english_obstacle(texts.expected, "its stems and synonyms are"):
        return obstacle
    return None if any(words(text) for text in texts.expected) else "the references have no words"


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
