"""How good predictions are: BLEU and ROUGE against every reference."""

from collections.abc import Sequence
from typing import Any

from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU


def score(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """`bleu`, `rouge1`, `rouge2` and `rougeL` of predictions, each against all of its references, from 0 to 100.

    BLEU is sacrebleu's over the corpus, case-insensitive, 13a tokens, as the E2E challenge scores. ROUGE is the mean
    over predictions of the best reference's F1 (rouge-score, stemmed).
    """
    if len(predictions) != len(references) or not predictions:
        raise ValueError(f"{len(predictions)} predictions for {len(references)} lists of references")
    most = max(map(len, references))
    # sacrebleu wants streams of references; a sentence with fewer than the most has None in the later ones.
    streams: Any = [[r[n] if n < len(r) else None for r in references] for n in range(most)]
    bleu = BLEU(lowercase=True, tokenize="13a").corpus_score(list(predictions), streams).score
    kinds = ("rouge1", "rouge2", "rougeL")
    scorer = RougeScorer(list(kinds), use_stemmer=True)
    sums = dict.fromkeys(kinds, 0.0)
    for prediction, texts in zip(predictions, references, strict=True):
        best = scorer.score_multi(list(texts), prediction)
        for kind in kinds:
            sums[kind] += best[kind].fmeasure
    means = {kind: 100 * total / len(predictions) for kind, total in sums.items()}
    return {"bleu": bleu, **means}
