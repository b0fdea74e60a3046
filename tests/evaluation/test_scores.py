"""Scores equal their libraries' on the same texts, and known values on fixed ones."""

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

from eval.score.bootstrap import RESAMPLES, interval, over_seeds, p_value, resample
from eval.score.meteor import meteor
from eval.score.metric import Metric, NotAvailableError, mean_of
from eval.score.registry import METRICS
from eval.score.scores import choose_metrics, score
from skipdecode import ConfigError

PREDICTIONS = ["The Mill is a cheap pub.", "aromi serves Italian food", "It is near The Vaults, by the river."]
REFERENCES = [
    ["The Mill is a cheap pub by the river.", "A cheap pub is The Mill."],
    ["Aromi serves Italian food."],
    ["It is near the Vaults.", "By the river, near The Vaults.", "It lies by the river near The Vaults."],
]
# Repeating a reference changes no clipped count and no closest length.
STREAMS = [[texts[min(n, len(texts) - 1)] for texts in REFERENCES] for n in range(3)]
NAMES = ["bleu", "nist", "rouge1", "rouge2", "rougeL", "cider"]


def corpus(items: int, seed: int, wrong: float) -> tuple[list[str], list[list[str]]]:
    """Texts of a few words with their references, in which a share of the predictions' words is another one."""
    rng = random.Random(seed)
    words = ["a", "cheap", "pub", "near", "the", "river", "serves", "food", "for", "kids", "and", "has", "good"]
    references = [[" ".join(rng.choices(words, k=rng.randint(5, 12))) for _ in range(3)] for _ in range(items)]
    noise = random.Random(f"{seed} {wrong}")
    predictions = [
        " ".join(noise.choice(words) if noise.random() < wrong else word for word in noise.choice(texts).split())
        for texts in references
    ]
    return predictions, references


def test_bleu_is_sacrebleus_with_every_reference_in_lower_case() -> None:
    expected = sacrebleu.corpus_bleu(PREDICTIONS, STREAMS, lowercase=True).score
    assert score(PREDICTIONS, REFERENCES).values["bleu"] == pytest.approx(expected)
    assert score([p.upper() for p in PREDICTIONS], REFERENCES).values["bleu"] == pytest.approx(expected)


def test_bleu_of_a_fixed_case_is_the_formulas_value() -> None:
    # By hand, Papineni et al. 2002: of 7 tokens, the full stop among them, 6 are in the reference, of the pairs 4,
    # of the threes 2, of the fours 1; it is as long as the reference, so there is no penalty.
    value = score(["The cat sat on the mat."], [["The cat sits on the mat."]], ["bleu"]).values["bleu"]
    by_hand = 100 * (6 / 7 * 4 / 6 * 2 / 5 * 1 / 4) ** (1 / 4)
    assert value == pytest.approx(by_hand)


def test_rouge_is_the_best_references() -> None:
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    scores = score(PREDICTIONS, REFERENCES).values
    for kind in ("rouge1", "rouge2", "rougeL"):
        best = [
            max(scorer.score(r, p)[kind].fmeasure for r in refs)
            for p, refs in zip(PREDICTIONS, REFERENCES, strict=True)
        ]
        assert scores[kind] == pytest.approx(100 * sum(best) / 3)


def test_rouge_of_a_fixed_case_is_the_formulas_value() -> None:
    # By hand, Lin 2004, with his example of section 3: 4 of 4 stems in common, 1 of 3 pairs, and a longest common
    # subsequence of 2.
    scores = score(["the gunman kill police"], [["police killed the gunman"]]).values
    assert (scores["rouge1"], scores["rougeL"]) == (pytest.approx(100), pytest.approx(50))
    assert scores["rouge2"] == pytest.approx(100 / 3)


def test_rouge_of_summaries_takes_each_line_for_a_sentence() -> None:
    # By hand, Lin 2004, section 3.2: both sentences are there, in another order; in a row, one of the two is.
    values = score(["a dog ran\nthe cat sat"], [["the cat sat\na dog ran"]], ["rougeL", "rougeLsum"]).values
    assert values == {"rougeL": pytest.approx(50), "rougeLsum": pytest.approx(100)}


def test_a_perfect_prediction_scores_100_and_a_foreign_one_0() -> None:
    perfect = score(["one two three four five"], [["nothing", "one two three four five"]]).values
    assert (perfect["bleu"], perfect["rouge1"], perfect["rougeL"]) == (pytest.approx(100), 100, 100)
    assert score(["x"], [["one two three four five"]]).values["rouge1"] == 0


def test_texts_without_words_score_0() -> None:
    scores = score(["", "."], [["a pub"], ["a pub by the river"]], NAMES)
    assert scores.values == pytest.approx(dict.fromkeys(NAMES, 0))
    assert scores.intervals == dict.fromkeys(NAMES, (0, 0))


@pytest.mark.parametrize("wrong", [0.5, 0.55])
def test_intervals_and_p_values_of_bleu_are_sacrebleus(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
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
    # Its resamples are the same; of its interval it says half the width, and takes the nearest resample.
    _, resampled = _bootstrap_resample(metric._extract_corpus_statistics(second, None), metric, RESAMPLES)
    assert two.resampled["bleu"] == pytest.approx(np.array([sample.score for sample in resampled]), rel=1e-5)
    _, half = estimate_ci(two.resampled["bleu"])
    low, high = two.intervals["bleu"]
    assert (high - low) / 2 == pytest.approx(half, rel=0.03)
    assert low < two.values["bleu"] < high
    assert baseline.score == pytest.approx(one.values["bleu"])


def test_resampled_sums_are_the_scores_of_the_resampled_texts() -> None:
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


def test_of_one_item_there_is_no_interval_and_no_significance() -> None:
    (good, references), (bad, _) = corpus(80, 2, 0.1), corpus(80, 2, 0.7)
    parts = ["alone", *[""] * 79]
    one = score(good, references, ["bleu"], parts=parts)
    two = score(bad, references, ["bleu"], parts=parts, against=one)
    assert two.values["bleu:alone"] != one.values["bleu:alone"]
    assert two.p_values["bleu:alone"] == 1
    assert two.p_values["bleu"] < 0.01
    assert set(two.intervals) == {"bleu"}


def test_every_metric_tells_a_clearly_better_system_from_a_worse_one_and_not_from_an_equal_one() -> None:
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
    """As much of a WordNet reader as METEOR asks of one: pub and bar are one synset."""

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
    """nltk as it is where none of its data is installed."""
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(
        "nltk.corpus.wordnet", nltk.corpus.util.LazyCorpusLoader("wordnet", nltk.corpus.WordNetCorpusReader)
    )


@pytest.mark.usefixtures("without_nltk_data")
def test_without_wordnet_meteor_is_not_there_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WNSEARCHDIR", str(tmp_path))
    scores = score(PREDICTIONS, REFERENCES, ["meteor", "bleu"])
    assert list(scores.values) == ["bleu"]
    assert "apt install wordnet-base" in scores.unavailable["meteor"]
    assert f"{tmp_path} has no index.noun" in scores.unavailable["meteor"]
    assert "meteor" not in scores.metrics


@pytest.mark.usefixtures("without_nltk_data")
def test_a_folder_as_wordnets_authors_release_it_is_enough_for_meteor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_with_wordnet_meteor_is_what_nltk_documents() -> None:
    # nltk.translate.meteor_score, the docstring of `meteor_score`: 0.6944 for its first reference, one of three.
    prediction = "It is a guide to action which ensures that the military always obeys the commands of the party"
    reference = "It is a guide to action that ensures that the military will forever heed Party commands"
    try:
        assert meteor([prediction], [[reference]]).value == pytest.approx(69.44, abs=0.005)
    except NotAvailableError as error:
        pytest.skip(str(error))


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 predictions for 1"):
        score(["a", "b"], [["a"]])
    with pytest.raises(ValueError, match="1 predictions for 1, 2"):
        score(["a"], [["a"]], meanings=["a", "b"])
    with pytest.raises(ValueError, match="against a system with 3"):
        score(["a"], [["a"]], against=score(PREDICTIONS, REFERENCES))


def test_metrics_are_the_tasks_or_those_asked_for() -> None:
    from eval.score.metric import BertModel

    task, bert = ("bleu", "rougeL", "bertscore"), BertModel("roberta-large")
    assert choose_metrics(task) == ("bleu", "rougeL")
    assert choose_metrics(task, bert=bert) == ("bleu", "rougeL", "bertscore")
    assert choose_metrics(task, ["nist", "nist"]) == ("nist",)
    assert choose_metrics((), ["nist"], bert) == ("nist", "bertscore")
    with pytest.raises(ConfigError, match="unknown metric 'blue': did you mean 'bleu'"):
        choose_metrics(task, ["blue"])
    with pytest.raises(ConfigError, match="bertscore is among the metrics and has no model"):
        choose_metrics(task, ["bertscore"])


def test_what_was_computed_is_said_with_its_version() -> None:
    scores = score(PREDICTIONS, REFERENCES)
    assert f"|version:{sacrebleu.__version__}" in scores.metrics["bleu"]
    assert "mteval-v13a" in scores.metrics["nist"]
    assert scores.metrics["rouge1"].startswith("rouge-score 0.")


def test_a_metric_is_one_object_and_one_line_of_the_registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = Metric(
        "words",
        "words",
        "nobody",
        lambda texts: mean_of([len(text.split()) for text in texts.predictions]),
        lambda texts: "words a text",
        lower_is_better=True,
    )
    monkeypatch.setitem(METRICS, words.name, words)
    scores = score(PREDICTIONS, REFERENCES, ["words"])
    assert scores.values == {"words": pytest.approx((6 + 4 + 8) / 3)}
    assert scores.metrics == {"words": "words a text"}
    report = finished_runs.write_run(tmp_path / "run")
    rows = [replace(row, scores={"words": 5.0}, intervals={"words": (4.0, 6.0)}, p_values={}) for row in report.rows]
    text = replace(report, rows=rows, metrics=scores.metrics).to_markdown()
    assert "| words |" in text
    assert "5.00 [4.0, 6.0]" in text
    assert "words: words a text." in text


def test_means_over_seeds_keep_the_resamples_apart_and_draw_the_seeds() -> None:
    items = np.linspace(0, 5, RESAMPLES)
    assert np.array_equal(over_seeds([items]), items)
    found = over_seeds([items + seed for seed in (0.0, 10.0, 20.0)]) - items
    assert set(np.unique(found.round(6))) == {round(10 * total / 3, 6) for total in range(7)}
    assert found.mean() == pytest.approx(10, abs=0.7)
    assert found.var() == pytest.approx((200 / 3) / 3, rel=0.15)  # of the mean of three draws of 0, 10, 20
