"""BLEU of a corpus (Papineni et al., ACL 2002), sacrebleu's (Post, WMT 2018)."""

from collections.abc import Sequence
from importlib import metadata

import numpy as np
from sacrebleu.metrics import BLEU as SacreBLEU

from eval.score.metric import Array, Metric, Statistics, Texts


def bleu(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Statistics:
    """BLEU from 0 to 100: case-insensitive, 13a tokens, every reference, zero counts smoothed exponentially."""
    # Sentences are asked for their counts alone, so this setting changes none of them: it quiets a warning.
    scorer = SacreBLEU(lowercase=True, tokenize="13a", effective_order=True)
    items = []
    for prediction, texts in zip(predictions, references, strict=True):
        counted = scorer.sentence_score(prediction, list(texts))
        items.append([counted.sys_len, counted.ref_len, *counted.counts, *counted.totals])
    return Statistics(np.array(items, dtype=np.float64), _score)


def _describe(texts: Texts) -> str:
    """As sacrebleu's signature says it."""
    return f"sacrebleu, nrefs:var|case:lc|eff:no|tok:13a|smooth:exp|version:{metadata.version('sacrebleu')}"


def _score(sums: Array) -> float:
    system_words, reference_words, *counts = (int(count) for count in sums)
    correct, total = counts[:4], counts[4:]
    return float(SacreBLEU.compute_bleu(correct, total, system_words, reference_words, smooth_method="exp").score)


BLEU = Metric(
    "bleu",
    "BLEU",
    "Papineni et al., ACL 2002; Post, WMT 2018 (sacrebleu)",
    lambda texts: bleu(texts.predictions, texts.references),
    _describe,
    in_short_table=True,
    adds_up=True,
)
