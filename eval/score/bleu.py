"""BLEU of a corpus (Papineni et al., ACL 2002), sacrebleu's (Post, WMT 2018)."""

from collections.abc import Sequence
from importlib import metadata

import numpy as np
from sacrebleu.metrics import BLEU as SacreBLEU

from data.task import Convention
from eval.score.metric import Array, Metric, Statistics, Texts
from eval.score.words import ascii_words

WEBNLG_REFERENCES = 3


def bleu(
    predictions: Sequence[str], references: Sequence[Sequence[str]], convention: Convention = "mteval"
) -> Statistics:
    """BLEU from 0 to 100: case-insensitive, zero counts smoothed exponentially.

    By mteval's rules of 13a tokens against every reference. By those of the WebNLG challenge of 2017 of words and signs
    in ASCII against the first three; and an item with fewer has empty ones in their place, as there, so that the length
    of a text of less than half of the others' words is held against nothing.
    """
    tokenize = "13a"
    if convention == "webnlg":
        tokenize = "none"
        predictions = [" ".join(ascii_words(text)) for text in predictions]
        references = [_three([" ".join(ascii_words(text)) for text in texts]) for texts in references]
    # Sentences are asked for their counts alone, so this setting changes none of them: it quiets a warning.
    scorer = SacreBLEU(lowercase=True, tokenize=tokenize, effective_order=True)
    items = []
    for prediction, texts in zip(predictions, references, strict=True):
        counted = scorer.sentence_score(prediction, list(texts))
        items.append([counted.sys_len, counted.ref_len, *counted.counts, *counted.totals])
    return Statistics(np.array(items, dtype=np.float64), _score)


def _three(texts: Sequence[str]) -> list[str]:
    return [*texts, "", ""][:WEBNLG_REFERENCES]


def _describe(texts: Texts) -> str:
    """As sacrebleu's signature says it."""
    rules = "nrefs:var|case:lc|eff:no|tok:13a|smooth:exp"
    if texts.convention == "webnlg":
        rules = "WebNLG 2017's rules: first 3 references, missing ones empty, case:lc|eff:no|tok:ASCII words|smooth:exp"
    return f"sacrebleu, {rules}|version:{metadata.version('sacrebleu')}"


def _score(sums: Array) -> float:
    system_words, reference_words, *counts = (int(count) for count in sums)
    correct, total = counts[:4], counts[4:]
    return float(SacreBLEU.compute_bleu(correct, total, system_words, reference_words, smooth_method="exp").score)


BLEU = Metric(
    "bleu",
    "BLEU",
    "Papineni et al., ACL 2002; Post, WMT 2018 (sacrebleu)",
    lambda texts: bleu(texts.predictions, texts.references, texts.convention),
    _describe,
    in_short_table=True,
    adds_up=True,
)
