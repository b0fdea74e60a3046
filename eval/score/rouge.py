"""ROUGE (Lin, 2004) by the rouge-score library of Google."""

import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import metadata

from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import Tokenizer

from eval.score.metric import Metric, Statistics, Texts, mean_of
from eval.score.tokenizers import (
    MAX_LOST,
    Words,
    lost_letters,
    signature,
    suitable,
    unspaced_obstacle,
    without_punctuation,
    words_by,
)

# Papers on CNN/DailyMail call ROUGE-Lsum ROUGE-L: summaries have one sentence per line, and LCS are united.
KINDS = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}
NOTABLE_LOSS = 0.01  # the report mentions a larger fraction of lost letters
_ASCII_WORD = re.compile(r"[a-z0-9]+")  # the tokens of rouge-score


def rouge(
    predictions: Sequence[str], references: Sequence[Sequence[str]], kind: str, tokenizer: str | None = None
) -> Statistics:
    """One kind of ROUGE from 0 to 100: F1 with the best reference, averaged over predictions.

    Words are those of rouge-score (a-z and 0-9, stemmed), or those of a tokenizer without punctuation, unstemmed.
    """
    kinds = (kind,) if kind == "rougeLsum" else tuple(KINDS)[:3]
    return mean_of(_best(tuple(predictions), tuple(map(tuple, references)), kinds, tokenizer)[kind], scale=100)


def _words(tokenizer: str | None) -> Words:
    """The words that ROUGE counts, before stemming."""
    if tokenizer is None:
        return lambda text: _ASCII_WORD.findall(text.lower())
    split = words_by(tokenizer, _ASCII_WORD.findall)
    return lambda text: without_punctuation(split(text))


class _Words(Tokenizer):  # type: ignore[misc]
    """A tokenizer of sacrebleu with the interface of rouge-score."""

    def __init__(self, tokenizer: str) -> None:
        self._split = _words(tokenizer)

    def tokenize(self, text: str) -> list[str]:
        """Split a text into words."""
        return self._split(text)


@lru_cache(maxsize=1)  # the kinds are requested one after another, and the first three are computed together
def _best(
    predictions: tuple[str, ...],
    references: tuple[tuple[str, ...], ...],
    kinds: tuple[str, ...],
    tokenizer: str | None,
) -> dict[str, list[float]]:
    """The F1 of each prediction with its best reference, for every kind."""
    own = _Words(tokenizer) if tokenizer is not None else None
    scorer = RougeScorer(list(kinds), use_stemmer=True, tokenizer=own)
    best = [scorer.score_multi(texts, text) for text, texts in zip(predictions, references, strict=True)]
    return {kind: [scores[kind].fmeasure for scores in best] for kind in kinds}


def _describe(texts: Texts, kind: str) -> str:
    version = f"rouge-score {metadata.version('rouge-score')}, F1 of the best reference"
    if kind == "rouge2" and (short := _without_pairs(texts)):
        version += f"; {short} of {len(texts.references)} items have no reference of two words and count as 0"
    if texts.tokenizer is not None:
        words = f"tokens of sacrebleu's {signature(texts.tokenizer)} in lower case without punctuation, unstemmed"
        return f"{version}, {words}, mean over items"
    lost = lost_letters(texts.expected, str.isascii)
    split = (
        f", words of a-z and 0-9 only: {lost:.1%} of the references' letters are other characters"
        if lost > NOTABLE_LOSS
        else ""
    )
    return f"{version}, stemmed, mean over items{split}"


def _without_pairs(texts: Texts) -> int:
    """The number of items without a reference of two words."""
    split = _words(texts.tokenizer)
    return sum(all(len(split(text)) < 2 for text in references) for references in texts.references)


def _obstacle(texts: Texts, kind: str) -> str | None:
    split = _words(texts.tokenizer)
    if texts.tokenizer is not None:
        if obstacle := unspaced_obstacle(texts.expected, texts.tokenizer, ""):
            return obstacle
    else:
        share = lost_letters(texts.expected, str.isascii)
        if share > MAX_LOST:
            return (
                f"its words consist of a-z and 0-9, and {share:.0%} of the references' letters are other characters: "
                f"choose the tokenizer {suitable(texts.expected)}"
            )
    for number, references in enumerate(texts.references, start=1):
        if any(map(str.isalpha, "".join(references))) and not any(split(text) for text in references):
            return (
                f"the references of item {number} contain letters but no words that it counts: choose the "
                f"tokenizer {suitable(references)}"
            )
    minimum = 2 if kind == "rouge2" else 1
    if not any(len(split(text)) >= minimum for text in texts.expected):
        return f"no reference has {'a word' if minimum == 1 else 'two words'} that it counts"
    return None


def _metric(kind: str) -> Metric:
    return Metric(
        kind,
        KINDS[kind],
        "Lin, Text Summarization Branches Out 2004",
        lambda texts: rouge(texts.predictions, texts.references, kind, texts.tokenizer),
        lambda texts: _describe(texts, kind),
        lambda texts: _obstacle(texts, kind),
        in_short_table=kind.startswith("rougeL"),
        adds_up=True,
    )


ROUGE = tuple(map(_metric, KINDS))
