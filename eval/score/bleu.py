"""BLEU of a corpus (Papineni et al., ACL 2002), sacrebleu's (Post, WMT 2018)."""

from collections.abc import Sequence
from importlib import metadata

import numpy as np
from sacrebleu.metrics import BLEU as SacreBLEU

from data.task import Convention
from eval.score.metric import Array, Metric, Statistics, Texts
from eval.score.tokenizers import MOST_LOST, Words, lost_letters, signature, suitable, unspaced_obstacle, words_by
from eval.score.words import ascii_words, words

WEBNLG_REFERENCES = 3
ORDER = 4  # the longest n-grams, in words


def bleu(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    convention: Convention = "mteval",
    tokenizer: str | None = None,
) -> Statistics:
    """BLEU from 0 to 100: case-insensitive, zero counts smoothed exponentially.

    By mteval's rules of 13a tokens against every reference. By those of the WebNLG challenge of 2017 of words and signs
    in ASCII against the first three; and an item with fewer has empty ones in their place, as there, so that the length
    of a text of less than half of the others' words is held against nothing. With a tokenizer its words are counted in
    place of these, by mteval's rules.
    """
    tokenize = "13a"
    if tokenizer is not None or convention == "webnlg":
        tokenize, split = "none", _words(convention, tokenizer)
        predictions = [" ".join(split(text)) for text in predictions]
        references = [[" ".join(split(text)) for text in texts] for texts in references]
        if tokenizer is None:
            references = list(map(_three, references))
    # Sentences are asked for their counts alone, so this setting changes none of them: it quiets a warning.
    scorer = SacreBLEU(lowercase=True, tokenize=tokenize, effective_order=True)
    items = []
    for prediction, texts in zip(predictions, references, strict=True):
        counted = scorer.sentence_score(prediction, list(texts))
        items.append([counted.sys_len, counted.ref_len, *counted.counts, *counted.totals])
    return Statistics(np.array(items, dtype=np.float64), _score)


def _three(texts: Sequence[str]) -> list[str]:
    return [*texts, "", ""][:WEBNLG_REFERENCES]


def _words(convention: Convention, tokenizer: str | None) -> Words:
    return words_by(tokenizer, ascii_words if convention == "webnlg" else words)


def _obstacle(texts: Texts) -> str | None:
    if texts.tokenizer is None and texts.convention == "webnlg":
        share = lost_letters(texts.right, lambda letter: bool(ascii_words(letter)))
        if share > MOST_LOST:
            return (
                f"its words, by the rules of WebNLG 2017, are in ASCII, and {share:.0%} of the references' letters "
                f"can't be written so: choose the tokenizer {suitable(texts.right)}"
            )
    elif obstacle := unspaced_obstacle(texts.right, texts.tokenizer, "13a"):
        return obstacle
    split = _words(texts.convention, texts.tokenizer)
    if not any(len(split(text)) >= ORDER for text in texts.right):
        return f"it counts up to {ORDER} words in a row, and no reference has as many"
    return None


def _describe(texts: Texts) -> str:
    """As sacrebleu's signature says it."""
    tokenizer = signature(texts.tokenizer) if texts.tokenizer is not None else "13a"
    rules = f"nrefs:var|case:lc|eff:no|tok:{tokenizer}|smooth:exp"
    if texts.convention == "webnlg" and texts.tokenizer is None:
        rules = "WebNLG 2017's rules: first 3 references, missing ones empty, case:lc|eff:no|tok:ASCII words|smooth:exp"
    return f"sacrebleu, {rules}|version:{metadata.version('sacrebleu')}"


def _score(sums: Array) -> float:
    system_words, reference_words, *counts = (int(count) for count in sums)
    correct, total = counts[:ORDER], counts[ORDER:]
    return float(SacreBLEU.compute_bleu(correct, total, system_words, reference_words, smooth_method="exp").score)


BLEU = Metric(
    "bleu",
    "BLEU",
    "Papineni et al., ACL 2002; Post, WMT 2018 (sacrebleu)",
    lambda texts: bleu(texts.predictions, texts.references, texts.convention, texts.tokenizer),
    _describe,
    _obstacle,
    in_short_table=True,
    adds_up=True,
)
