"""Corpus BLEU (Papineni et al., ACL 2002) by sacrebleu (Post, WMT 2018)."""

from collections.abc import Sequence
from importlib import metadata

import numpy as np
from sacrebleu.metrics import BLEU as SacreBLEU

from data.task import Convention
from eval.score.metric import Array, Metric, Statistics, Texts
from eval.score.tokenizers import MAX_LOST, Words, lost_letters, signature, suitable, unspaced_obstacle, words_by
from eval.score.words import ascii_words, words

WEBNLG_REFERENCES = 3
ORDER = 4  # the longest n-grams, in words


def bleu(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    convention: Convention = "mteval",
    tokenizer: str | None = None,
) -> Statistics:
    """BLEU from 0 to 100: case-insensitive, with exponential smoothing of zero counts.

    The convention "mteval" counts 13a tokens against all references. "webnlg", the rules of the WebNLG challenge 2017,
    counts ASCII words and signs against the first three references; missing references are empty, as in the challenge,
    so the brevity penalty doesn't apply to outputs with less than half of the words of the shortest one. A tokenizer
    replaces the tokens, with all references.
    """
    tokenize = "13a"
    if tokenizer is not None or convention == "webnlg":
        tokenize, split = "none", _words(convention, tokenizer)
        predictions = [" ".join(split(text)) for text in predictions]
        references = [[" ".join(split(text)) for text in texts] for texts in references]
        if tokenizer is None:
            references = list(map(_first_references, references))
    # Only counts are used, which effective_order doesn't change; it suppresses a warning.
    scorer = SacreBLEU(lowercase=True, tokenize=tokenize, effective_order=True)
    items = []
    for prediction, texts in zip(predictions, references, strict=True):
        counted = scorer.sentence_score(prediction, list(texts))
        items.append([counted.sys_len, counted.ref_len, *counted.counts, *counted.totals])
    return Statistics(np.array(items, dtype=np.float64), _score)


def _first_references(texts: Sequence[str]) -> list[str]:
    return [*texts, "", ""][:WEBNLG_REFERENCES]


def _words(convention: Convention, tokenizer: str | None) -> Words:
    return words_by(tokenizer, ascii_words if convention == "webnlg" else words)


def _obstacle(texts: Texts) -> str | None:
    if texts.tokenizer is None and texts.convention == "webnlg":
        share = lost_letters(texts.expected, lambda letter: bool(ascii_words(letter)))
        if share > MAX_LOST:
            return (
                f"the rules of WebNLG 2017 count ASCII words, and {share:.0%} of the references' letters can't be "
                f"converted to ASCII: choose the tokenizer {suitable(texts.expected)}"
            )
    elif obstacle := unspaced_obstacle(texts.expected, texts.tokenizer, "13a"):
        return obstacle
    split = _words(texts.convention, texts.tokenizer)
    if not any(len(split(text)) >= ORDER for text in texts.expected):
        return f"it counts n-grams up to {ORDER} words, and no reference has as many words"
    return None


def _describe(texts: Texts) -> str:
    """The signature of sacrebleu."""
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
