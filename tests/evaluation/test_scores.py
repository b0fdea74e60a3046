"""Scores equal those of the libraries, and known values for fixed texts."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import finished_runs
import numpy as np
import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest, _bootstrap_resample, estimate_ci

from eval.score.bootstrap import RESAMPLES, interval, p_value, resample
from eval.score.meteor import meteor
from eval.score.metric import Metric, NotAvailableError, Statistics, Texts, mean_of
from eval.score.registry import METRICS
from eval.score.scores import choose_metrics, score
from skipdecode import ConfigError

PREDICTIONS = ["The Mill is a cheap pub.", "aromi serves Italian food", "It's near Café Müller – £20-25, “cheap”."]
REFERENCES = [
    ["The Mill is a cheap pub by the river.", "A cheap pub is The Mill."],
    ["Aromi serves Italian food."],
    ["It's near Café Müller.", "Cheap: near Café Müller, £20-25.", "5-star – isn’t “cheap”; it’s near Café Müller."],
]
# Repeating a reference doesn't change clipped counts or closest lengths.
STREAMS = [[texts[min(n, len(texts) - 1)] for texts in REFERENCES] for n in range(3)]
NAMES = ["bleu", "nist", "rouge1", "rouge2", "rougeL", "cider"]


def corpus(items: int, seed: int, wrong: float) -> tuple[list[str], list[list[str]]]:
    """Short predictions with references, where a fraction of the words is replaced."""
    rng = random.Random(seed)
    words = ["a", "cheap", "pub", "near", "the", "river", "serves", "food", "for", "kids", "and", "has", "good"]
    references = [[" ".join(rng.choices(words, k=rng.randint(5, 12))) for _ in range(3)] for _ in range(items)]
    noise = random.Random(f"{seed} {wrong}")
    predictions = [
        " ".join(noise.choice(words) if noise.random() < wrong else word for word in noise.choice(texts).split())
        for texts in references
    ]
    return predictions, references


def test_bleu_equals_lower_case_sacrebleu_with_all_references() -> None:
    expected = sacrebleu.corpus_bleu(PREDICTIONS, STREAMS, lowercase=True).score
    assert score(PREDICTIONS, REFERENCES).values["bleu"] == pytest.approx(expected)
    assert score([p.upper() for p in PREDICTIONS], REFERENCES).values["bleu"] == pytest.approx(expected)


def test_bleu_of_a_fixed_case_equals_the_formula() -> None:
    # By hand, Papineni et al. 2002: of 7 tokens, the full stop among them, 6 are in the reference, of the pairs 4,
    # of the threes 2, of the fours 1; it is as long as the reference, so there is no penalty.
    value = score(["The cat sat on the mat."], [["The cat sits on the mat."]], ["bleu"]).values["bleu"]
    by_hand = 100 * (6 / 7 * 4 / 6 * 2 / 5 * 1 / 4) ** (1 / 4)
    assert value == pytest.approx(by_hand)


def test_rouge_uses_the_best_reference() -> None:
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    scores = score(PREDICTIONS, REFERENCES).values
    for kind in ("rouge1", "rouge2", "rougeL"):
        pairs = zip(PREDICTIONS, REFERENCES, strict=True)
        best = [max(scorer.score(text, found)[kind].fmeasure for text in texts) for found, texts in pairs]
        assert scores[kind] == pytest.approx(100 * sum(best) / 3)


def test_rouge_of_a_fixed_case_equals_the_formula() -> None:
    # By hand, Lin 2004, with his example of section 3: 4 of 4 stems in common, 1 of 3 pairs, and a longest common
    # subsequence of 2.
    scores = score(["the gunman kill police"], [["police killed the gunman"]]).values
    assert (scores["rouge1"], scores["rougeL"]) == (pytest.approx(100), pytest.approx(50))
    assert scores["rouge2"] == pytest.approx(100 / 3)


def test_rouge_lsum_treats_each_line_as_a_sentence() -> None:
    # By hand, Lin 2004, section 3.2: both sentences are there, in another order; in a row, one of the two is.
    values = score(["a dog ran\nthe cat sat"], [["the cat sat\na dog ran"]], ["rougeL", "rougeLsum"]).values
    assert values == {"rougeL": pytest.approx(50), "rougeLsum": pytest.approx(100)}


def test_a_perfect_prediction_scores_100_and_an_unrelated_one_0() -> None:
    perfect = score(["one two three four five"], [["nothing", "one two three four five"]]).values
    assert (perfect["bleu"], perfect["rouge1"], perfect["rougeL"]) == (pytest.approx(100), 100, 100)
    assert score(["x"], [["one two three four five"]]).values["rouge1"] == 0


def test_predictions_without_words_score_0() -> None:
    scores = score(["", "."], [["a pub"], ["a pub by the river"]], NAMES)
    assert scores.values == pytest.approx(dict.fromkeys(NAMES, 0))
    assert scores.intervals == dict.fromkeys(NAMES, (0, 0))


@pytest.mark.parametrize("wrong", [0.5, 0.55])
def test_intervals_and_p_values_of_bleu_equal_sacrebleu(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SACREBLEU_SEED", raising=False)
    (first, references), (second, _) = corpus(60, 0, 0.5), corpus(60, 0, wrong + 0.05)
    streams = [[texts[n] for texts in references] for n in range(3)]
    one = score(first, references, ["bleu"])
    two = score(second, references, ["bleu"], against=one)
    metric = BLEU(lowercase=True, references=streams)
    _, results = PairedTest([("one", first), ("two", second)], {"BLEU": metric}, None, test_type="bs")()
    baseline, system = results["BLEU"]
    assert two.values["bleu"] == pytest.approx(system.score)
    assert two.p_values["bleu"] == pytest.approx(system.p_value)
    assert 0.001 < two.p_values["bleu"] < 0.9
    # sacrebleu uses the same resamples, but reports half the width of the interval between nearest resamples.
    _, resampled = _bootstrap_resample(metric._extract_corpus_statistics(second, None), metric, RESAMPLES)
    assert two.resampled["bleu"] == pytest.approx(np.array([sample.score for sample in resampled]), rel=1e-5)
    _, half = estimate_ci(two.resampled["bleu"])
    low, high = two.intervals["bleu"]
    assert (high - low) / 2 == pytest.approx(half, rel=0.03)
    assert low < two.values["bleu"] < high
    assert baseline.score == pytest.approx(one.values["bleu"])


def test_resampled_scores_equal_the_scores_of_resampled_texts() -> None:
    predictions, references = corpus(12, 1, 0.4)
    statistics = score(predictions, references, ["bleu", "rougeL"])
    drawn = np.random.default_rng(12345).choice(12, size=(RESAMPLES, 12), replace=True)
    for row in (0, 1, 999):
        again = score([predictions[n] for n in drawn[row]], [references[n] for n in drawn[row]], ["bleu", "rougeL"])
        for name, value in again.values.items():
            assert statistics.resampled[name][row] == pytest.approx(value)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_a_mean_lies_in_its_interval_and_a_system_never_differs_from_itself(scores: list[float]) -> None:
    statistics = mean_of(scores)
    resampled = resample(statistics)
    low, high = interval(resampled)
    assert min(scores) - 1e-9 <= low <= high <= max(scores) + 1e-9
    assert p_value(0.0, resampled - resampled) == 1


def test_a_single_item_has_no_interval_and_no_significance() -> None:
    (good, references), (bad, _) = corpus(80, 2, 0.1), corpus(80, 2, 0.7)
    parts = ["alone", *[""] * 79]
    one = score(good, references, ["bleu"], parts=parts)
    two = score(bad, references, ["bleu"], parts=parts, against=one)
    assert two.values["bleu:alone"] != one.values["bleu:alone"]
    assert two.p_values["bleu:alone"] == 1
    assert two.p_values["bleu"] < 0.01
    assert set(two.intervals) == {"bleu"}


def test_every_metric_distinguishes_a_better_system_from_a_worse_one_but_not_from_an_equal_one() -> None:
    (good, references), (bad, _) = corpus(80, 2, 0.1), corpus(80, 2, 0.7)
    one = score(good, references, NAMES)
    worse, same = score(bad, references, NAMES, against=one), score(good, references, NAMES, against=one)
    for name in NAMES:
        assert worse.values[name] < one.values[name]
        assert worse.p_values[name] == pytest.approx(1 / 1001)
        assert worse.intervals[name][1] < one.intervals[name][0]
        assert same.p_values[name] == 1
    assert score(good, references, ["bleu"]).p_values == {}


class OneSynonym:
    """A minimal WordNet reader for METEOR, where pub and bar are one synset."""

    def synsets(self, word: str) -> list[Any]:
        class Lemma:
            def __init__(self, name: str) -> None:
                self.name = lambda: name

        class Synset:
            def lemmas(self) -> list[Lemma]:
                return [Lemma("pub"), Lemma("bar")]

        return [Synset()] if word in ("pub", "bar") else []


def test_meteor_matches_words_stems_and_synonyms() -> None:
    # By hand, Lavie and Agarwal 2007, alpha 0.9, beta 3, gamma 0.5: two words, a stem and a synonym, in one chunk, so F
    # is 1 and the penalty 0.5 * (1 / 4) ** 3.
    statistics = meteor(["A nice bar serves"], [["a nice pub serving"]], wordnet=OneSynonym())
    assert statistics.value == pytest.approx(100 * (1 - 0.5 / 4**3))
    # Without the synonym 3 of 4 words in two chunks, by the first reference; the second is worse.
    statistics = meteor(["A nice inn serves"], [["a nice pub serving", "a"]], wordnet=OneSynonym())
    assert statistics.value == pytest.approx(100 * 3 / 4 * (1 - 0.5 * (2 / 3) ** 3))


@pytest.fixture
def without_nltk_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """nltk without installed data."""
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    unread = nltk.corpus.util.LazyCorpusLoader("wordnet", nltk.corpus.WordNetCorpusReader)
    monkeypatch.setattr("nltk.corpus.wordnet", unread)


@pytest.mark.usefixtures("without_nltk_data")
def test_meteor_without_wordnet_gives_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WNSEARCHDIR", str(tmp_path))
    scores = score(PREDICTIONS, REFERENCES, ["meteor", "bleu"])
    assert list(scores.values) == ["bleu"]
    assert "apt install wordnet-base" in scores.unavailable["meteor"]
    assert f"{tmp_path} has no index.noun" in scores.unavailable["meteor"]
    assert "meteor" not in scores.metrics


@pytest.mark.usefixtures("without_nltk_data")
def test_meteor_works_with_a_wordnet_dictionary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # wndb(5WN): one synset of a noun with two words, its exceptions and the other kinds' files empty; no `lexnames`,
    # which Debian's wordnet-base leaves out.
    for kind in ("noun", "verb", "adj", "adv"):
        for name in (f"index.{kind}", f"data.{kind}", f"{kind}.exc"):
            (tmp_path / name).write_text("")
    (tmp_path / "data.noun").write_text("00000000 06 n 02 pub 0 bar 0 000 | a house that serves drinks  \n")
    (tmp_path / "index.noun").write_text("bar n 1 0 1 0 00000000  \npub n 1 0 1 0 00000000  \n")
    monkeypatch.setenv("WNSEARCHDIR", str(tmp_path))
    found = meteor(["A nice bar serves", "A nice inn serves"], [["a nice pub serving"]] * 2)
    expected = meteor(["A nice bar serves", "A nice inn serves"], [["a nice pub serving"]] * 2, wordnet=OneSynonym())
    assert found.items == pytest.approx(expected.items)
    assert found.items[0, 0] > found.items[1, 0]


def test_meteor_equals_the_example_in_the_documentation_of_nltk() -> None:
    # nltk.translate.meteor_score, the docstring of `meteor_score`: 0.6944 for its first reference, one of three.
    prediction = "It is a guide to action which ensures that the military always obeys the commands of the party"
    reference = "It is a guide to action that ensures that the military will forever heed Party commands"
    try:
        assert meteor([prediction], [[reference]]).value == pytest.approx(69.44, abs=0.005)
    except NotAvailableError as error:
        pytest.skip(str(error))


def test_score_refuses_lists_of_different_lengths() -> None:
    with pytest.raises(ValueError, match="2 predictions for 1"):
        score(["a", "b"], [["a"]])
    with pytest.raises(ValueError, match="1 predictions for 1, 2"):
        score(["a"], [["a"]], meanings=["a", "b"])
    with pytest.raises(ValueError, match="but the other system has 3"):
        score(["a"], [["a"]], against=score(PREDICTIONS, REFERENCES))


def test_metrics_are_those_requested_or_those_of_the_task() -> None:
    from eval.score.metric import BertModel

    task, bert = ("bleu", "rougeL", "bertscore"), BertModel("roberta-large")
    assert choose_metrics(task) == ("bleu", "rougeL")
    assert choose_metrics(task, bert=bert) == ("bleu", "rougeL", "bertscore")
    assert choose_metrics(task, ["nist", "nist"]) == ("nist",)
    assert choose_metrics((), ["nist"], bert) == ("nist", "bertscore")
    with pytest.raises(ConfigError, match="unknown metric 'blue': did you mean 'bleu'"):
        choose_metrics(task, ["blue"])
    with pytest.raises(ConfigError, match="bertscore is among the metrics but has no model"):
        choose_metrics(task, ["bertscore"])


def test_descriptions_of_metrics_contain_library_versions() -> None:
    scores = score(PREDICTIONS, REFERENCES)
    assert f"|version:{sacrebleu.__version__}" in scores.metrics["bleu"]
    assert "mteval-v13a" in scores.metrics["nist"]
    assert scores.metrics["rouge1"].startswith("rouge-score 0.")


def test_a_new_metric_needs_only_a_line_in_the_registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def count(texts: Texts) -> Statistics:
        return mean_of([len(text.split()) for text in texts.predictions])

    words = Metric("words", "words", "nobody", count, lambda texts: "words a text", lower_is_better=True)
    monkeypatch.setitem(METRICS, words.name, words)
    scores = score(PREDICTIONS, REFERENCES, ["words"])
    assert scores.values == {"words": pytest.approx((6 + 4 + 7) / 3)}
    assert scores.metrics == {"words": "words a text"}
    report = finished_runs.write_run(tmp_path / "run")
    rows = [replace(row, scores={"words": 5.0}, intervals={"words": (4.0, 6.0)}, p_values={}) for row in report.rows]
    text = replace(report, rows=rows, metrics=scores.metrics).to_markdown()
    assert "| words |" in text
    assert "5.00 [4.0, 6.0]" in text
    assert "words: words a text." in text
