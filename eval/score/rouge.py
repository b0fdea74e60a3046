"""ROUGE (Lin, 2004) by Google's rouge-score."""

from collections.abc import Sequence
from functools import lru_cache
from importlib import metadata

from rouge_score.rouge_scorer import RougeScorer

from eval.score.metric import Metric, Statistics, Texts, mean_of

# ROUGE-Lsum is what tables of CNN/DailyMail call ROUGE-L: of summaries of a sentence a line, by the union of their LCS.
KINDS = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}


def rouge(predictions: Sequence[str], references: Sequence[Sequence[str]], kind: str) -> Statistics:
    """One kind of ROUGE from 0 to 100: the mean over predictions of the best reference's F1, of stemmed words."""
    together = (kind,) if kind == "rougeLsum" else tuple(KINDS)[:3]
    return mean_of(_best(tuple(predictions), tuple(map(tuple, references)), together)[kind], scale=100)


@lru_cache(maxsize=1)  # the kinds are asked for one after another, and all but the last come of the same words
def _best(
    predictions: tuple[str, ...], references: tuple[tuple[str, ...], ...], kinds: tuple[str, ...]
) -> dict[str, list[float]]:
    """Each prediction's F1 with its best reference, for every kind."""
    scorer = RougeScorer(list(kinds), use_stemmer=True)
    best = [scorer.score_multi(texts, text) for text, texts in zip(predictions, references, strict=True)]
    return {kind: [scores[kind].fmeasure for scores in best] for kind in kinds}


def _describe(texts: Texts) -> str:
    return f"rouge-score {metadata.version('rouge-score')}, F1 of the best reference, stemmed, mean over items"


def _metric(kind: str) -> Metric:
    return Metric(
        kind,
        KINDS[kind],
        "Lin, Text Summarization Branches Out 2004",
        lambda texts: rouge(texts.predictions, texts.references, kind),
        _describe,
        in_short_table=kind.startswith("rougeL"),
        adds_up=True,
    )


ROUGE = tuple(map(_metric, KINDS))
