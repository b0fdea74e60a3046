"""A run on real articles: evaluation truncates them as training does."""

import json
from pathlib import Path
from typing import Any

import pytest

import eval.cli
import eval.decoding
import train.cli
from data import load_task
from eval.systems.base import DecodedBatch, System
from skipdecode.checkpoint.loading import load_model, load_tokenizer
from skipdecode.checkpoint.skip_config import SkipConfig

RECIPE = """
model: {shape: opt-tiny, config: {num_hidden_layers: 4, hidden_size: 32, word_embed_proj_dim: 32, ffn_dim: 64,
        num_attention_heads: 4, vocab_size: 50272}}
data: {task: cnndm, options: {holdout: 3}, limit: 6, max_prompt_tokens: 60, max_completion_tokens: 20}
schedule: {speedups: [1], horizon: 16}
train: {max_steps: 2, per_device_batch_size: 3, logging_steps: 1}
tracking: {wandb: "off"}
"""


@pytest.fixture
def recipe(shared_data: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    changes = [f"model.tokenizer={shared_data / 'opt'}", f"data.path={shared_data / 'cnndm'}"]
    return ["--recipe", str(tmp_path / "tiny.yaml"), *changes, f"output.dir={tmp_path / 'run'}"]


def test_evaluation_truncates_articles_as_training_does(
    recipe: list[str], shared_data: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    assert train.cli.main(recipe) == 0
    printed = capsys.readouterr().err
    assert "6 rows" in printed
    assert "6 prompts were truncated to data.max_prompt_tokens" in printed
    config = SkipConfig.load(folder)
    assert config is not None
    assert config.task["example"].endswith("\n\nTL;DR:")
    assert {**config.task, "example": None} == {
        "name": "cnndm",
        "options": {"holdout": 3},
        "max_prompt_tokens": 60,
        "example": None,
    }

    decoded: list[list[list[int]]] = []
    original = System.decode

    def recording(self: System, prompts: list[list[int]], *asked: Any, **named: Any) -> DecodedBatch:
        decoded.append(prompts)
        return original(self, prompts, *asked, **named)

    monkeypatch.setattr(System, "decode", recording)
    arguments = ["--checkpoint", str(folder), "--data-dir", str(shared_data / "cnndm"), "--speedup", "1"]
    arguments += ["--limit", "2", "--max-new-tokens", "4"]
    assert eval.cli.main([*arguments, "--output", str(tmp_path / "eval")]) == 0
    tokenizer = load_tokenizer(str(folder))
    lines = [json.loads(t) for t in (tmp_path / "eval" / "predictions" / "1x.jsonl").read_text().splitlines()]
    ending = tokenizer("\n\nTL;DR:", add_special_tokens=False)["input_ids"]
    assert [line["id"] for line in lines] == ["cnndm-test-0", "cnndm-test-1"]
    assert sorted(decoded[-1]) == sorted(tokenizer(line["prompt"])["input_ids"][:54] + ending for line in lines)
    assert json.loads((tmp_path / "eval" / "report.json").read_text())["prompts_cut"] == 2
    assert "2 prompts (2 of them truncated)" in (tmp_path / "eval" / "report.md").read_text()

    # With a higher limit, the model's 256 positions limit prompts; the last generated token needs no position.
    examples = load_task("cnndm", path=str(shared_data / "cnndm")).load("train")
    prompts = eval.decoding.encode_test_set(
        load_model(str(folder)), tokenizer, examples, max_prompt_tokens=896, max_new_tokens=4
    )
    whole = [len(tokenizer(e.body)["input_ids"]) + 6 for e in examples]
    assert [len(prompt.ids) for prompt in prompts] == [min(length, 253) for length in whole]
