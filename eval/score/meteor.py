"""METEOR (Lavie and Agarwal, WMT 2007) by nltk."""

from collections.abc import Sequence
from importlib import metadata
from typing import Any

from eval.score.metric import Metric, NotAvailableError, Statistics, Texts, mean_of
from eval.score.words import words


def meteor(predictions: Sequence[str], references: Sequence[Sequence[str]], wordnet: Any = None) -> Statistics:
    """METEOR from 0 to 100: the mean over predictions of the best reference; words match exactly, by stem or as
    synonyms.

    Args:
        wordnet: a reader of WordNet; None: nltk's, from the data that is installed.

    Raises NotAvailableError where nltk finds no WordNet: without its synonyms it would be another metric.
    """
    from nltk.translate.meteor_score import meteor_score  # here: nltk takes a second

    reader = wordnet if wordnet is not None else _installed_wordnet()
    scores = [
        meteor_score([words(reference) for reference in texts], words(text), wordnet=reader)
        for text, texts in zip(predictions, references, strict=True)
    ]
    return mean_of(scores, scale=100)


def _describe(texts: Texts) -> str:
    return f"nltk {metadata.version('nltk')} (exact, stem and WordNet; not METEOR 1.5), 13a tokens, best reference"


def _installed_wordnet() -> Any:
    from nltk.corpus import wordnet

    try:
        wordnet.ensure_loaded()
    except (LookupError, OSError) as error:
        raise NotAvailableError(
            "nltk finds no WordNet data: install it with `python -m nltk.downloader wordnet`, or name its folder in "
            "NLTK_DATA"
        ) from error
    return wordnet


METEOR = Metric(
    "meteor",
    "METEOR",
    "Lavie and Agarwal, WMT 2007",
    lambda texts: meteor(texts.predictions, texts.references),
    _describe,
)
