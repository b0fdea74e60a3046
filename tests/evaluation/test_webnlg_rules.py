"""BLEU with the rules of the WebNLG challenge, scores of parts of a test set, and scores of challenge outputs."""

import json
import math
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.score.bleu import bleu
from eval.score.cli import main
from eval.score.registry import METRICS, metric_named, short
from eval.score.scores import score
from eval.score.words import ascii_words
from skipdecode import ConfigError

TEXT = st.lists(
    st.sampled_from(["a", "Pub", "bar", "é", "in", "Åland", "18L/36R", "x-y", "it's"]), min_size=4, max_size=14
)


def grams(text: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(text[at : at + n]) for at in range(len(text) - n + 1))


def multi_bleu(predictions: list[list[str]], references: list[list[list[str]]]) -> float:
    """multi-bleu.perl of Moses, except for zero counts, over three files of references.

    A line is empty where there is no reference.
    """
    matched, total, length, closest = [0] * 4, [0] * 4, 0, 0
    for text, several in zip(predictions, references, strict=True):
        three = [*several, [], []][:3]
        length += len(text)
        closest += min((abs(len(one) - len(text)), len(one)) for one in three)[1]
        for n in range(4):
            most: Counter[tuple[str, ...]] = Counter()
            for one in three:
                most |= grams(one, n + 1)
            matched[n] += (grams(text, n + 1) & most).total()
            total[n] += grams(text, n + 1).total()
    if not matched[0]:
        return 0.0
    penalty, logarithms = min(0.0, 1 - closest / length), 0.0
    smallest = 1.0
    for count, all_ in zip(matched, total, strict=True):
        if not count:  # smoothed (Chen and Cherry 2014, method 3, as in mteval-v13a.pl), unlike multi-bleu.perl
            smallest /= 2
        logarithms += math.log((count or smallest) / all_)
    return 100 * math.exp(penalty + logarithms / 4)


@given(st.lists(st.tuples(TEXT, st.lists(TEXT, min_size=1, max_size=5)), min_size=3, max_size=6))
def test_bleu_with_webnlg_rules_equals_multi_bleu_on_its_tokens(items: list[tuple[list[str], list[list[str]]]]) -> None:
    def parted(text: str) -> list[str]:
        """Lower case without accents, with every non-letter separated, character by character."""
        plain = unicodedata.normalize("NFKD", text.lower()).encode("ascii", "ignore").decode()
        return "".join(c if c.isalnum() or c == "_" else f" {c} " for c in plain).split()

    predictions, references = [" ".join(text) for text, _ in items], [[" ".join(r) for r in refs] for _, refs in items]
    expected = multi_bleu([parted(p) for p in predictions], [[parted(r) for r in several] for several in references])
    found = bleu(predictions, references, "webnlg").value
    assert found == pytest.approx(expected)


def test_letters_that_unicode_does_not_decompose_become_ascii_too() -> None:
    assert ascii_words("Straße–Łódź, Kızılay’s “Ørsted”") == (
        ["strasse", "-", "lodz", ",", "kizilay", "'", "s", '"', "orsted", '"']
    )


def test_scores_of_a_part_equal_those_of_its_items_only() -> None:
    predictions = ["The Mill is a cheap pub.", "aromi serves Italian food", "It is near The Vaults, by the river."]
    references = [["The Mill is a cheap bar."], ["Aromi serves Italian food."], ["It is near the Vaults.", "A river."]]
    predictions, references = [*predictions, "Zizzi is a pub"], [*references, ["Zizzi is a cheap pub."]]
    names, parts = ["bleu", "nist", "rougeL", "cider"], ["seen", "unseen", "seen", "unseen"]
    scores = score(predictions, references, names, parts=parts)
    assert list(scores.values) == [f"{name}{part}" for name in names for part in ("", ":seen", ":unseen")]
    for part in ("seen", "unseen"):
        chosen = [n for n in range(4) if parts[n] == part]
        alone = score([predictions[n] for n in chosen], [references[n] for n in chosen], names)
        for name in names:
            assert scores.values[f"{name}:{part}"] == pytest.approx(alone.values[name])
            assert scores.intervals[f"{name}:{part}"] == pytest.approx(alone.intervals[name])
    assert scores.values["bleu"] == pytest.approx(score(predictions, references).values["bleu"])
    assert list(score(predictions, references, ["bleu"], parts=[""] * 4).values) == ["bleu"]
    with pytest.raises(ValueError, match="4 predictions for 4, 1"):
        score(predictions, references, parts=["seen"])


def test_the_score_of_a_part_is_labelled_with_its_metric_and_part() -> None:
    assert metric_named("bleu:unseen").label == "BLEU unseen"
    assert metric_named("nist:seen").decimals == METRICS["nist"].decimals
    shown = short(dict.fromkeys(["rougeL", "rougeL:seen", "bleu", "bleu:seen", "bleu:unseen"], 1.0))
    assert [metric.name for metric in shown] == ["bleu", "bleu:seen", "bleu:unseen", "rougeL"]
    for name in ("blue:seen", "bleu:<b>", "bleu:se en"):
        with pytest.raises(ConfigError, match="unknown metric"):
            metric_named(name)
    with pytest.raises(ConfigError, match="unknown metric 'bleu:seen'"):
        score(["a"], [["a"]], ["bleu:seen"])


def scored(file: Path, output: Path, *options: str) -> dict[str, Any]:
    assert main(["--predictions", str(file), "--output", str(output), *options]) == 0
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(
    ("system", "published"), [("melbourne", (45.13, 54.52, 33.27)), ("baseline", (33.24, 52.39, 6.13))]
)
def test_the_published_scores_of_the_challenge_are_reproduced(
    system: str, published: tuple[float, ...], shared_data: Path, tmp_path: Path
) -> None:
    # Gardent et al., INLG 2017, tables 7 to 9: all, seen and unseen categories.
    file = shared_data / "systems" / f"webnlg-{system}.txt"
    options = ["--task", "webnlg", "--data-dir", str(shared_data / "webnlg"), "--metrics", "bleu"]
    found = scored(file, tmp_path / "scores.json", *options)
    assert tuple(round(found[name], 2) for name in ("bleu", "bleu:seen", "bleu:unseen")) == published


def e2e_folder(tmp_path: Path) -> Path:
    rows = 'mr,ref\n"name[Aromi], area[riverside]",Aromi is by the river.\nname[Zizzi],Zizzi.\n'
    (tmp_path / "devset.csv").write_text(rows, encoding="utf-8")
    (tmp_path / "testset_w_refs.csv").write_text(rows, encoding="utf-8")
    return tmp_path


def test_outputs_in_text_and_table_files_are_matched_with_the_test_split_in_order(tmp_path: Path, capsys: Any) -> None:
    options = ["--task", "e2e", "--data-dir", str(e2e_folder(tmp_path)), "--metrics", "rougeL", "slot_error_rate"]
    lines, table = tmp_path / "system.txt", tmp_path / "system.tsv"
    lines.write_text("Aromi is by the river.\nZizzi is cheap.\n", encoding="utf-8")
    rows = '"area[riverside], name[Aromi]"\tAromi is by the river.\nname[Zizzi]\tZizzi is cheap.\n'
    table.write_text(f"MR\toutput\n{rows}", encoding="utf-8")
    first, second = scored(lines, tmp_path / "1.json", *options), scored(table, tmp_path / "2.json", *options)
    assert first["slot_error_rate"] == second["slot_error_rate"] == pytest.approx(100 / 3)  # a price is added
    assert first["rougeL"] == second["rougeL"] == pytest.approx(100 * (1 + 0.5) / 2)
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "1", "prompt": "name[Zizzi]", "prediction": "", "references": ["Zizzi."]}\n', "utf-8")
    beside = ["--predictions", str(other), "--against", str(lines), "--output", str(tmp_path / "3.json")]
    assert main([*beside, *options]) == 2
    assert f"line 1: {lines} has no prediction for '1'" in " ".join(capsys.readouterr().err.split())
    for file, text, message in (
        (lines, "one\n", "has 1 outputs, but the test split of e2e has 2"),
        (table, "MR\toutput\nname[Zizzi]\tone\nname[Zizzi]\ttwo\n", "output 1 is for 'name\\[Zizzi\\]'"),
        (table, "MR\toutput\nname[Zizzi]\n", "line 2: expected a header"),
        (table, f"MR\toutput\nname[Zizzi]\t{'a' * 200_000}\n", "has 1 outputs, but the test split of e2e has 2"),
    ):
        file.write_text(text, encoding="utf-8")
        assert main(["--predictions", str(file), "--output", str(tmp_path / "3.json"), *options]) == 2
        printed = " ".join(capsys.readouterr().err.split())
        assert message.replace("\\", "") in printed
    assert main(["--predictions", str(lines), "--output", str(tmp_path / "3.json"), "--metrics", "bleu"]) == 2
    assert "--task NAME" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "3.json").exists()
