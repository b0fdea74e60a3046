"""ROUGE (Lin, 2004) by Google's rouge-score."""

from collections.abc import Sequence
from importlib import metadata

from rouge_score.rouge_scorer import RougeScorer

from eval.metric import Statistics, mean_of

KINDS = ("rouge1", "rouge2", "rougeL")


def rouge(
    predictions: Sequence[str], references: Sequence[Sequence[str]], kinds: Sequence[str] = KINDS
) -> dict[str, Statistics]:
    """Each kind of ROUGE from 0 to 100: the mean over predictions of the best reference's F1, of stemmed words."""
    scorer = RougeScorer(list(kinds), use_stemmer=True)
    best = [scorer.score_multi(list(texts), text) for text, texts in zip(predictions, references, strict=True)]
    return {kind: mean_of([scores[kind].fmeasure for scores in best], scale=100) for kind in kinds}


def describe() -> str:
    """What was computed."""
    return f"rouge-score {metadata.version('rouge-score')}, F1 of the best reference, stemmed, mean over items"
