"""Scores equal their libraries' on the same texts, and known values on fixed ones."""

import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer

from eval.scores import score

PREDICTIONS = ["The Mill is a cheap pub.", "aromi serves Italian food", "It is near The Vaults, by the river."]
REFERENCES = [
    ["The Mill is a cheap pub by the river.", "A cheap pub is The Mill."],
    ["Aromi serves Italian food."],
    ["It is near the Vaults.", "By the river, near The Vaults.", "It lies by the river near The Vaults."],
]


def test_bleu_is_sacrebleus_with_every_reference_in_lower_case() -> None:
    most = max(map(len, REFERENCES))
    # Repeating a reference changes no clipped count and no closest length.
    streams = [[r[min(n, len(r) - 1)] for r in REFERENCES] for n in range(most)]
    expected = sacrebleu.corpus_bleu(PREDICTIONS, streams, lowercase=True).score
    assert score(PREDICTIONS, REFERENCES)["bleu"] == pytest.approx(expected)
    assert score([p.upper() for p in PREDICTIONS], REFERENCES)["bleu"] == pytest.approx(expected)


def test_rouge_is_the_best_references() -> None:
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    scores = score(PREDICTIONS, REFERENCES)
    for kind in ("rouge1", "rouge2", "rougeL"):
        best = [
            max(scorer.score(r, p)[kind].fmeasure for r in refs)
            for p, refs in zip(PREDICTIONS, REFERENCES, strict=True)
        ]
        assert scores[kind] == pytest.approx(100 * sum(best) / 3)


def test_a_perfect_prediction_scores_100_and_a_foreign_one_0() -> None:
    perfect = score(["one two three four five"], [["nothing", "one two three four five"]])
    assert (perfect["bleu"], perfect["rouge1"], perfect["rougeL"]) == (pytest.approx(100), 100, 100)
    assert score(["x"], [["one two three four five"]])["rouge1"] == 0


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 predictions for 1"):
        score(["a", "b"], [["a"]])
