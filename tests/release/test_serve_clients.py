"""Clients of OpenAI's API, each as its users call it, against a server with a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from served_checkpoints import Server

import skipdecode

pytestmark = pytest.mark.release
pytest_plugins = ["tool_server"]  # checkpoint, server
ASK: Any = [{"role": "user", "content": "vehicle: tram"}]
SCHEMA = {
    "title": "departure",
    "type": "object",
    "properties": {"late": {"type": "boolean"}},
    "required": ["late"],
    "additionalProperties": False,
}
ROWS = [
    {"question": "vehicle: tram", "choices": [" It leaves.", " to: Saltfern"], "answer": 0},
    {"question": "vehicle: ferry | to: Mossford", "choices": [" The ferry", " 9.40", " line"], "answer": 2},
]
TASK = """
task: departures_of_a_test
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
"""


def expected(server: Server, **fields: Any) -> str:
    """The text that OpenAI's own client gets."""
    answer = server.client.chat.completions.create(model="tiny", messages=ASK, **fields)
    return str(answer.choices[0].message.content)


def test_litellm_gets_what_openais_client_gets(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks for prices when it is imported
    litellm = pytest.importorskip("litellm")
    how = {"api_base": str(server.client.base_url), "api_key": "none", "max_tokens": 6}
    chat = {"model": "openai/tiny", "messages": ASK, "frequency_penalty": 0.5, "presence_penalty": 0.5, **how}
    plain = expected(server, max_tokens=6, frequency_penalty=0.5, presence_penalty=0.5)
    assert litellm.completion(**chat).choices[0].message.content == plain
    parts = litellm.completion(**chat, stream=True, stream_options={"include_usage": True})
    pieces = [part.choices[0].delta.content or "" for part in parts if part.choices]  # the last part has usage alone
    assert "".join(pieces) == plain
    text = litellm.text_completion(model="text-completion-openai/tiny", prompt="vehicle: tram", **how)
    assert text.choices[0].text == server.text(False, {"model": "tiny", "prompt": "vehicle: tram", "max_tokens": 6})


def test_langchain_gets_what_openais_client_gets(server: Server) -> None:
    langchain = pytest.importorskip("langchain_openai")
    how: dict[str, Any] = {"model": "tiny", "base_url": str(server.client.base_url), "api_key": "none"}
    chat = langchain.ChatOpenAI(**how, max_tokens=6, temperature=0)
    assert chat.invoke("vehicle: tram").content == expected(server, max_tokens=6)
    assert "".join(part.content for part in chat.stream("vehicle: tram")) == expected(server, max_tokens=6)
    tool = {"name": "leaves", "description": "When it leaves.", "parameters": {"type": "object", "properties": {}}}
    answer = chat.bind_tools([tool]).invoke("vehicle: tram")
    assert (answer.tool_calls, answer.response_metadata["finish_reason"]) == (
        [],
        "length",
    )  # random weights call nothing
    pytest.importorskip("llguidance")
    structured = langchain.ChatOpenAI(**how, max_tokens=60).with_structured_output(SCHEMA)
    assert type(structured.invoke("vehicle: tram")["late"]) is bool
    completions = langchain.OpenAI(**how, max_tokens=6, temperature=0)
    text = server.text(False, {"model": "tiny", "prompt": "vehicle: tram", "max_tokens": 6})
    assert completions.invoke("vehicle: tram") == text
    assert "".join(completions.stream("vehicle: tram")) == text


@torch.no_grad()
def loglikelihood(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    """The log probability of a continuation by a forward pass of transformers, and whether it is the greedy one."""
    before = tokenizer(context, add_special_tokens=False)["input_ids"]
    tokens = tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
    logprobs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)[len(before) - 1 :]
    targets = torch.tensor(tokens[len(before) :])
    greedy = bool((logprobs.argmax(-1) == targets).all())
    return float(logprobs.gather(1, targets[:, None]).sum()), greedy


def test_lm_eval_gets_the_loglikelihoods_of_transformers(
    server: Server, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "task.yaml").write_text(TASK.replace("FILE", str(file)))
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "tiny",
            "base_url": f"{server.client.base_url}completions",
            "tokenizer": str(checkpoint),
            "tokenizer_backend": "huggingface",
            "max_length": 512,
        },
        batch_size=3,
        tasks=["departures_of_a_test"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    model, tokenizer = skipdecode.load(str(checkpoint))
    samples = found["samples"]["departures_of_a_test"]
    assert len(samples) == len(ROWS)
    for sample in samples:
        row = sample["doc"]
        assert len(sample["filtered_resps"]) == len(row["choices"])
        for (value, greedy), choice in zip(sample["filtered_resps"], row["choices"], strict=True):
            logprob, is_greedy = loglikelihood(model, tokenizer, row["question"], choice)
            assert value == pytest.approx(logprob, abs=1e-4)
            assert greedy == is_greedy
