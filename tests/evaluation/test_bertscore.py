"""BERTScore equals bert-score for the given model and layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_bert import save_tiny_bert
from transformers import AutoTokenizer
from transformers import BertModel as Bert

from eval.score.bertscore import bertscore, describe
from eval.score.metric import BertModel
from eval.score.scores import score
from skipdecode import ConfigError

PREDICTIONS = ["aromi is a pub.", "zizzi", " "]
REFERENCES = [["a pub is aromi.", "aromi is a bar."], ["zizzi."], ["the mill"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("bert"))


def by_hand(prediction: str, reference: str, folder: Path, layer: int) -> float:
    """F1 of the greedy matching of Zhang et al. 2020, section 3: [CLS] and [SEP] are matched with, but don't count."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), Bert.from_pretrained(folder).eval()

    def states(text: str) -> torch.Tensor:
        with torch.no_grad():
            output = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
        hidden = output.hidden_states[layer][0]  # [tokens, hidden]
        return torch.nn.functional.normalize(hidden, dim=-1)

    likeness = states(prediction) @ states(reference).T
    precision, recall = likeness.max(dim=1).values[1:-1].mean(), likeness.max(dim=0).values[1:-1].mean()
    return float(2 * precision * recall / (precision + recall))


@pytest.mark.parametrize("layer", [1, 3])
def test_bertscore_follows_the_definition_of_the_paper_with_the_best_reference(folder: Path, layer: int) -> None:
    statistics = bertscore(PREDICTIONS, REFERENCES, BertModel(str(folder), layer))
    for number in (0, 1):
        best = max(by_hand(PREDICTIONS[number], text, folder, layer) for text in REFERENCES[number])
        assert statistics.items[number, 0] == pytest.approx(100 * best, rel=1e-4)
    assert statistics.items[2, 0] == 0  # the prediction is empty
    assert describe(BertModel(str(folder), layer)).endswith(f"{folder}, layer {layer}")


def test_bertscore_works_in_the_score_command(folder: Path) -> None:
    scores = score(PREDICTIONS, REFERENCES, ["bertscore"], bert=BertModel(str(folder), 2))
    low, high = scores.intervals["bertscore"]
    assert low < scores.values["bertscore"] < high
    assert "no default model" in score(PREDICTIONS, REFERENCES, ["bertscore"]).unavailable["bertscore"]


def test_unsuitable_bert_models_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(name: Any, layers: int | None) -> str:
        with pytest.raises(ConfigError) as caught:
            bertscore(PREDICTIONS, REFERENCES, BertModel(str(name), layers))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "can't be loaded" in message(tmp_path / "nowhere", 2)
    assert "bert-score has no default layer" in (error := message(folder, None))
    assert "give --bertscore-layers between 1 and 3" in error
    assert "--bertscore-layers is 4" in message(folder, 4)
    assert "--bertscore-layers is 0" in message(folder, 0)
    endless = save_tiny_bert(tmp_path / "endless", model_max_length=10**30)
    assert "set model_max_length in its tokenizer_config.json" in message(endless, 2)
    monkeypatch.setitem(__import__("sys").modules, "bert_score", None)
    assert "pip install -e '.[bertscore]'" in message(folder, 1)
