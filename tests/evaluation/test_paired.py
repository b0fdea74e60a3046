"""The paired bootstrap over stored statistics."""

import random

import pytest
import sacrebleu

from eval.score.scores import score
from eval.search.paired import METRICS, corpus_score, estimate, sentence_statistics
from skipdecode import ConfigError

WORDS = ["the", "cat", "sat", "on", "a", "mat", "by", "river", "and", "ate", "cheap", "food", "in", "town"]


def texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, 12))) for _ in range(count)]


PREDICTIONS = ["", *texts(29, 1)]
REFERENCES = [[text, *more] for text, more in zip(texts(30, 2), [texts(n % 4, 3 + n) for n in range(30)], strict=True)]


@pytest.mark.parametrize("metric", METRICS)
def test_sentence_statistics_add_up_to_the_corpus_score(metric: str) -> None:
    rows = sentence_statistics(metric, PREDICTIONS, REFERENCES)
    expected = score(PREDICTIONS, REFERENCES, [metric]).values[metric]
    assert corpus_score(metric, rows) == pytest.approx(expected)
    assert estimate(metric, rows).value == pytest.approx(expected)


def test_the_interval_of_bleu_agrees_with_sacrebleu() -> None:
    predictions = [reference[0] + " again" for reference in REFERENCES[:20]] + texts(10, 9)
    streams = [[r[min(n, len(r) - 1)] for r in REFERENCES] for n in range(4)]
    theirs = sacrebleu.BLEU(lowercase=True).corpus_score(predictions, streams, n_bootstrap=1000)
    ours = estimate("bleu", sentence_statistics("bleu", predictions, REFERENCES))
    assert (ours.high - ours.low) / 2 == pytest.approx(theirs._ci, rel=0.1)


def test_differences_are_paired_by_prompt() -> None:
    """Prompts differ more than systems, so the interval of the difference is narrower than those of the scores."""
    good = [[float(n), 1.0] for n in range(0, 100, 2)]
    better = [[float(n) + 1 + n % 4 / 10, 1.0] for n in range(0, 100, 2)]
    lead = estimate("rougeL", better, baseline=good)
    assert lead.low < lead.value < lead.high
    assert lead.value == pytest.approx(1.1)
    assert lead.high - lead.low < 0.1 < estimate("rougeL", good).error
    assert estimate("rougeL", good, baseline=good).error == 0


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'bleu'"):
        sentence_statistics("blue", ["a"], [["a"]])
    with pytest.raises(ValueError, match="1 prompts, but the baseline has 2"):
        estimate("rougeL", [[1.0, 1.0]], baseline=[[1.0, 1.0], [2.0, 1.0]])
