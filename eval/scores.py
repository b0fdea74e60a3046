"""How good predictions are: BLEU and ROUGE against every reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU


@dataclass(frozen=True)
class Scores:
    """Corpus scores, each between 0 and 100."""

    bleu: float
    rouge1: float
    rouge2: float
    rougeL: float


def score(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
    """Scores of predictions, each against all of its references.

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
    return Scores(bleu=bleu, rouge1=means["rouge1"], rouge2=means["rouge2"], rougeL=means["rougeL"])
