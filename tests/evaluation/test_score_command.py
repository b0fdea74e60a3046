"""`python -m eval.score`: scores, comparisons and errors with line numbers for predictions of any system."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval.score.cli import main
from eval.score.scores import score

LINES: list[dict[str, Any]] = [
    {
        "id": "1",
        "prompt": "name: Aromi | area: riverside\n",
        "prediction": "Aromi is by the river.",
        "references": ["Aromi lies by the river.", "By the river there is Aromi."],
    },
    {
        "id": "2",
        "prompt": "name[Zizzi], food[Italian]",
        "prediction": "Zizzi is in the city\u2028centre.",
        "references": ["Zizzi serves Italian food."],
    },
    {"id": 3, "prompt": "name: Xname\n", "meaning": "name[The Mill]", "prediction": "", "references": ["The Mill."]},
]


def write(path: Path, lines: list[Any]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def changed(**fields: Any) -> list[dict[str, Any]]:
    return [LINES[0], {**LINES[1], **fields}, LINES[2]]


def run(tmp_path: Path, *arguments: str, lines: list[Any] = LINES, task: str = "e2e") -> int:
    file = write(tmp_path / "system.jsonl", lines)
    output = ["--output", str(tmp_path / "scores.json")]
    return main(["--predictions", str(file), *(["--task", task] if task else []), *output, *arguments])


def test_the_score_file_has_scores_at_the_top_level_with_their_descriptions(tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path) == 0
    scores = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    expected = score([line["prediction"] for line in LINES], [line["references"] for line in LINES])
    for name, value in expected.values.items():
        assert scores[name] == pytest.approx(value)
        assert scores["intervals"][name] == pytest.approx(expected.intervals[name])
        assert scores["metrics"][name] == expected.metrics[name]
    # Of 5 slots the food and the name are missing, and an area is added.
    assert scores["slot_error_rate"] == pytest.approx(100 * 3 / 5)
    assert {"cider", "rouge1", "rouge2"} <= set(scores)
    assert "meteor" in scores or "WordNet" in scores["unavailable"]["meteor"]
    assert "p_values" not in scores
    printed = capsys.readouterr().out
    assert f" {scores['cider']:.3f} " in printed  # with the decimals of the other tables
    (tmp_path / "scores.json").unlink()
    # With a byte order mark, as some editors write.
    assert run(tmp_path, lines=["\ufeff" + json.dumps(LINES[0]), *LINES[1:], ""]) == 0
    assert json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))["bleu"] == scores["bleu"]
    assert "3 predictions" in printed
    assert "slot_error_rate" in printed


def test_predictions_of_two_systems_are_matched_by_item_in_any_order(tmp_path: Path, capsys: Any) -> None:
    other = [{**line, "prediction": line["references"][0]} for line in reversed(LINES)]
    against = write(tmp_path / "other.jsonl", other)
    assert run(tmp_path, "--against", str(against), "--metrics", "rougeL") == 0
    scores = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    assert scores["against"]["rougeL"] == pytest.approx(100)
    assert scores["rougeL"] < 100
    assert 0 < scores["p_values"]["rougeL"] <= 1
    assert "difference" in capsys.readouterr().out


def test_a_single_prediction_has_no_interval(tmp_path: Path) -> None:
    assert run(tmp_path, "--metrics", "rougeL", lines=LINES[:1]) == 0
    assert json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))["intervals"] == {}


def test_metrics_can_be_named_without_a_task(tmp_path: Path) -> None:
    assert run(tmp_path, "--metrics", "nist", "rouge2", task="") == 0
    scores = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    assert {"nist", "rouge2"} == set(scores["metrics"])


def test_a_narrow_terminal_truncates_no_names_or_figures(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    lines = [{**line, "part": "unseen"} for line in LINES]
    against = write(tmp_path / "other.jsonl", lines)
    assert run(tmp_path, "--against", str(against), lines=lines) == 0
    assert "…" not in capsys.readouterr().out


def test_a_prompt_without_slots_only_makes_the_slot_error_rate_unavailable(tmp_path: Path) -> None:
    assert run(tmp_path, lines=changed(prompt="Describe Zizzi.")) == 0
    scores = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    assert "bleu" in scores
    assert "item 2 has no meaning representation (" in scores["unavailable"]["slot_error_rate"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "system.jsonl has no lines"),
        ([LINES[0], '{"id": "2", '], "system.jsonl, line 2: not JSON"),
        ([LINES[0], "[1]"], "line 2: expected an object with id, prompt, prediction, references"),
        ([LINES[0], {"id": "2", "prompt": "", "references": ["a"]}], "line 2: the field 'prediction' is missing"),
        (changed(references=[]), "line 2: '2' has no references"),
        (changed(references=[" "]), "line 2: '2' has no references"),
        (changed(references="text"), "line 2: references is 'text': it must be a list of strings"),
        (changed(references=[1]), "line 2: references is [1]: it must be a list of strings"),
        (changed(prediction=None), "line 2: prediction is None: it must be a string"),
        (changed(meaning=3), "line 2: meaning is 3: it must be a string"),
        (changed(id=True), "line 2: id is True: it must be a string"),
        (changed(id="1"), "line 2: the id '1' was used before, in "),
        (changed(id="3"), "line 3: the id '3' was used before, in "),
    ],
)
def test_an_invalid_line_is_named_in_the_error(lines: list[Any], message: str, tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path, lines=lines) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "scores.json").exists()


def test_invalid_options_are_refused(tmp_path: Path, capsys: Any) -> None:
    def message(*arguments: str, **options: Any) -> str:
        assert run(tmp_path, *arguments, **options) == 2
        return str(capsys.readouterr().err)

    assert "--task is missing" in message(task="")
    assert "unknown task 'e2ee': did you mean 'e2e'" in message(task="e2ee")
    assert "unknown metric 'blue': did you mean 'bleu'" in message("--metrics", "blue")
    assert "bertscore is among the metrics but has no model" in message("--metrics", "bertscore")
    assert "--bertscore-layers is 3, but --bertscore-model is missing" in message("--bertscore-layers", "3")
    assert "can't be loaded" in message("--bertscore-model", str(tmp_path / "nowhere"))
    assert "can't be read" in message("--against", str(tmp_path / "nowhere.jsonl"))
    assert "doesn't exist" in message("--output", str(tmp_path / "nowhere" / "scores.json"))
    fewer = write(tmp_path / "fewer.jsonl", LINES[:2])
    assert "line 3: " in (error := message("--against", str(fewer)))
    assert "fewer.jsonl has no prediction for '3'" in error
    more = write(tmp_path / "more.jsonl", [*LINES, {**LINES[0], "id": "4"}])
    assert "system.jsonl has no prediction for '4'" in message("--against", str(more))
    other = write(tmp_path / "other.jsonl", changed(references=["another"]))
    assert "the references of '2' differ from those in" in message("--against", str(other))
    for field, one, two in (("meaning", "name[Aromi]", "name[Zizzi]"), ("part", "seen", "unseen")):
        other = write(tmp_path / f"{field}.jsonl", changed(**{field: two}))
        error = message("--against", str(other), lines=changed(**{field: one}))
        assert f"{field}.jsonl, line 2: the {field} of '2' differs from that in " in error
    (tmp_path / "scores.json").touch()
    assert "already exists" in message()
