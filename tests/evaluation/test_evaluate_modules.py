"""The metrics as modules of `evaluate`, loaded from the repository in a process without network."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_bert import save_tiny_bert

from eval.score.metric import BertModel
from eval.score.registry import METRICS
from eval.score.scores import score

ROOT = Path(__file__).resolve().parents[2]
PREDICTIONS = ["Aromi is a pub by the river.", "Zizzi serves food"]
REFERENCES = [["Aromi is a riverside pub.", "By the river there is a pub, Aromi."], ["Zizzi serves Italian food."]]
MEANINGS = ["name[Aromi], eatType[pub], area[riverside]", "name: Zizzi | food: Italian"]

SCRIPT = """
import json, sys
import evaluate
asked = json.load(sys.stdin)
results = {}
for name, inputs in asked.items():
    metric = evaluate.load(f"eval/metrics/{name}")
    try:
        results[name] = metric.compute(**inputs)
    except Exception as error:
        results[name] = {"error": str(error)}
    if name == "rouge":
        words = {"predictions": ["我爱北京"], "references": [["我爱上海"]]}
        results["chinese"] = {"value": metric.compute(**words, tokenizer="zh")["rouge1"]}
    if name == "bleu":
        metric.add_batch(predictions=inputs["predictions"], references=[texts[0] for texts in inputs["references"]])
        results["one reference"] = metric.compute()
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def results(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    inputs: dict[str, Any] = {"predictions": PREDICTIONS, "references": REFERENCES}
    asked = {path.name: inputs for path in sorted((ROOT / "eval" / "metrics").iterdir()) if path.name != "__pycache__"}
    asked["bertscore"] = {**inputs, "model": str(bert), "layers": 2}
    asked["slot_error_rate"] = {"predictions": PREDICTIONS, "references": MEANINGS}
    home = str(tmp_path_factory.mktemp("home"))  # an empty home, without caches
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": home}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_every_evaluate_module_equals_score(results: dict[str, Any], bert: Path) -> None:
    scores = score(PREDICTIONS, REFERENCES, list(METRICS), meanings=MEANINGS, bert=BertModel(str(bert), 2))
    given = {name: value for result in results.values() for name, value in result.items()}
    for name, value in scores.values.items():
        if name != "bleu":
            assert given[name] == pytest.approx(value), name
    assert results["bleu"] == {"bleu": pytest.approx(scores.values["bleu"])}
    assert set(METRICS) - set(scores.values) <= {"meteor", "exact_match"}  # without WordNet, and without results
    if "meteor" in scores.unavailable:
        assert "WordNet" in results["meteor"]["error"]


def test_a_single_reference_may_be_a_string(results: dict[str, Any]) -> None:
    expected = score(PREDICTIONS, [texts[:1] for texts in REFERENCES], ["bleu"]).values["bleu"]
    assert results["one reference"]["bleu"] == pytest.approx(expected)


def test_the_score_command_supports_tokenizers(results: dict[str, Any]) -> None:
    assert results["chinese"]["value"] == pytest.approx(50)


def test_the_description_of_bertscore_names_model_and_layer(results: dict[str, Any], bert: Path) -> None:
    assert (results["bertscore"]["model"], results["bertscore"]["layer"]) == (str(bert), 2)
