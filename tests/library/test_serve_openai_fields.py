"""Fields of OpenAI's requests that change what is generated or returned, against naive loops and transformers."""

import copy
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from served_checkpoints import Server
from transformers import LogitsProcessor, LogitsProcessorList

import skipdecode
from skipdecode import Engine
from skipdecode.serve.tool_calls import ToolCallParser

pytest_plugins = ["tool_server"]  # checkpoint, server
PROMPTS = ["vehicle: ferry | to: Saltfern\n", "vehicle: train | to: Mossford | leaves: 9.40\n"]
NEW = 12


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> tuple[Any, Any]:
    return skipdecode.load(str(checkpoint))


def complete(server: Server, prompt: Any, **fields: Any) -> Any:
    """The first choice of a response."""
    return server.client.completions.create(**{"model": "tiny", "prompt": prompt, "max_tokens": NEW, **fields}).choices[
        0
    ]


def text_of(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@torch.no_grad()
def penalised(loaded: tuple[Any, Any], prompt: str, presence: float, frequency: float) -> str:
    """The greedy output under OpenAI's penalties, by a full forward pass for each token."""
    model, tokenizer = loaded
    tokens, new = tokenizer(prompt)["input_ids"], []
    while len(new) < NEW and model.config.eos_token_id not in new:
        logits = model(torch.tensor([tokens + new])).logits[0, -1].tolist()
        for token, count in Counter(new).items():
            logits[token] -= presence + frequency * count
        new.append(max(range(len(logits)), key=logits.__getitem__))
    return text_of(tokenizer, new)


def test_penalties_are_those_of_a_naive_loop_for_each_request_of_a_batch(
    server: Server, loaded: tuple[Any, Any]
) -> None:
    cases = [(p, pres, freq) for p in PROMPTS for pres, freq in ((0, 0), (2, 0), (0, 1.5), (0.5, 0.25), (-2, -2))]

    def send(case: tuple[str, float, float], **more: Any) -> str:
        prompt, presence, frequency = case
        return str(complete(server, prompt, presence_penalty=presence, frequency_penalty=frequency, **more).text)

    with ThreadPoolExecutor(len(cases)) as pool:
        found = list(pool.map(send, cases))
    expected = [penalised(loaded, *case) for case in cases]
    assert found == expected
    assert len(set(expected)) > len(PROMPTS), "the penalties changed nothing"
    assert send(cases[3], extra_body={"lossless": True, "speedup": 2}) == expected[3]


def test_best_of_must_equal_n(server: Server) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[0], "n": 2, "temperature": 1, "seed": 3}
    answers = [server.client.completions.create(**fields, **more) for more in ({}, {"best_of": 2})]
    assert [choice.text for choice in answers[0].choices] == [choice.text for choice in answers[1].choices]
    for best_of in (1, 3):
        with pytest.raises(openai.BadRequestError, match=f"best_of is {best_of} and n is 2") as refused:
            server.client.completions.create(**fields, best_of=best_of)
        assert refused.value.param == "best_of"


@torch.no_grad()
def logprobs_of(loaded: tuple[Any, Any], tokens: list[int]) -> list[float]:
    """The log probability of each token but the first at full depth."""
    logprobs = loaded[0](torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return [float(logprobs[place, token]) for place, token in enumerate(tokens[1:])]


def test_an_echo_has_the_log_probabilities_of_the_prompt(server: Server, loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1]
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    for max_tokens in (0, 1, 4):
        answer = server.client.completions.create(
            model="tiny", prompt=prompts, max_tokens=max_tokens, logprobs=2, echo=True
        )
        for prompt, choice in zip(prompts, answer.choices, strict=True):
            plain = complete(server, prompt, max_tokens=max_tokens, logprobs=2) if max_tokens else None
            new = plain.logprobs.token_logprobs if plain else []
            found: Any = choice.logprobs
            assert found.token_logprobs[0] is found.top_logprobs[0] is None
            assert found.token_logprobs[1 : len(prompt)] == pytest.approx(logprobs_of(loaded, prompt), abs=1e-5)
            assert found.token_logprobs[len(prompt) :] == new
            assert all(len(top) == 2 for top in found.top_logprobs[1 : len(prompt)])
            text = text_of(tokenizer, prompt)
            assert choice.text == text + (plain.text if plain else "")
            assert len(found.text_offset) == len(found.tokens) == len(prompt) + len(new)
            assert found.text_offset[len(prompt) :] == [
                len(text) + n for n in (plain.logprobs.text_offset if plain else [])
            ]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == sum(len(c.logprobs.tokens) for c in answer.choices) - sum(  # type: ignore[union-attr,arg-type]
            map(len, prompts)
        )


def test_an_echo_at_a_speed_scores_each_token_as_if_it_had_been_generated(server: Server) -> None:
    speed = {"speedup": 2, "over": "decode"}
    start = server.tokenizer(PROMPTS[0])["input_ids"][:1]
    new: list[int] = []
    with server.client.completions.create(
        model="tiny", prompt=start, max_tokens=NEW, logprobs=0, stream=True, extra_body={**speed, "details": True}
    ) as stream:
        logprobs: list[float] = []
        for part in stream:
            new.append(part.skipdecode["token"])  # type: ignore[attr-defined]
            logprobs += part.choices[0].logprobs.token_logprobs  # type: ignore[union-attr,operator]
    how: Any = {"max_tokens": 0, "logprobs": 0, "echo": True}
    found = complete(server, [*start, *new], **how, extra_body=speed).logprobs.token_logprobs[1:]
    assert found == pytest.approx(logprobs, abs=1e-4)
    full = complete(server, [*start, *new], **how).logprobs.token_logprobs[1:]
    assert full != pytest.approx(found, abs=1e-4)
    lossless = complete(
        server, [*start, *new], **how, extra_body={"lossless": True, "speedup": 2}
    ).logprobs.token_logprobs[1:]
    assert lossless == full


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 1}, {"logprobs": 1, "max_tokens": 0}, {"n": 2, "seed": 1, "top_p": 0.9}]
)
def test_an_echo_is_streamed_as_it_is_returned(server: Server, fields: dict[str, Any]) -> None:
    how: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS, "max_tokens": 4, "echo": True, **fields}
    whole = server.client.completions.create(**how).choices
    texts, logprobs = [""] * len(whole), [[] for _ in whole]  # type: ignore[var-annotated]
    for part in server.client.completions.create(**how, stream=True):
        for choice in part.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
    assert texts == [choice.text for choice in whole]
    assert all(text.startswith(PROMPTS[n * len(PROMPTS) // len(texts)]) for n, text in enumerate(texts))
    assert logprobs == [choice.logprobs.token_logprobs if choice.logprobs else [] for choice in whole]


SCHEMA = {
    "type": "object",
    "properties": {
        "line": {"type": "string", "maxLength": 3},
        "stops": {"type": "array", "items": {"enum": ["Saltfern", "Mossford"]}, "maxItems": 2},
        "late": {"type": "boolean"},
    },
    "required": ["line", "stops", "late"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "departure", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
def test_with_a_schema_every_output_parses_and_has_the_schemas_fields(server: Server, stream: bool) -> None:
    pytest.importorskip("llguidance")
    cases: list[dict[str, Any]] = [
        {},
        {"temperature": 1.5, "seed": 1, "n": 3},
        {"extra_body": {"speedup": 2}},
        {"extra_body": {"speedup": 2, "lossless": True}},
        {"frequency_penalty": 1},
    ]

    def send(case: dict[str, Any]) -> list[str]:
        answer: Any = server.client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "a"}],
            max_tokens=100,
            response_format=FORMAT,  # type: ignore[arg-type]
            stream=stream,
            **case,
        )
        if not stream:
            assert all(choice.finish_reason == "stop" for choice in answer.choices)
            return [choice.message.content for choice in answer.choices]
        texts = [""] * case.get("n", 1)
        for part in answer:
            texts[part.choices[0].index] += part.choices[0].delta.content or ""
        return texts

    with ThreadPoolExecutor(len(cases)) as pool:  # beside each other and beside a request without a mask
        plain = pool.submit(complete, server, PROMPTS[0])
        found = [text for texts in pool.map(send, cases) for text in texts]
    for text in found:
        parsed = json.loads(text)
        assert parsed.keys() == {"line", "stops", "late"}
        assert len(parsed["line"]) <= 3
        assert {*parsed["stops"]} <= {"Saltfern", "Mossford"}
        assert type(parsed["late"]) is bool
    assert len(set(found)) > 2
    assert found[5] == found[0], "the lossless output is that of full depth"
    assert plain.result().text == complete(server, PROMPTS[0]).text


def test_with_json_object_every_output_that_ends_is_a_json_object(server: Server) -> None:
    pytest.importorskip("llguidance")
    bias = {server.tokenizer("}", add_special_tokens=False)["input_ids"][-1]: 8}
    answer = server.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        max_tokens=90,
        n=8,
        seed=5,
        temperature=1,
        logit_bias=bias,  # type: ignore[arg-type]
        response_format={"type": "json_object"},
    )
    ended = [str(choice.message.content) for choice in answer.choices if choice.finish_reason == "stop"]
    assert ended
    assert all(type(json.loads(text)) is dict for text in ended)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"type": "grammar"}, 'response_format.type is "grammar"'),
        ({"type": "json_schema"}, "response_format: its type is json_schema"),
        ({"type": "json_object", "json_schema": {"name": "a"}}, "response_format: its type is json_object"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}, "schema that can't be enforced"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": []}}, "schema is \\[\\]: it must be an object"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "http://a.example"}}}, "enforced"),
    ],
)
def test_a_response_format_that_cannot_be_enforced_is_refused(server: Server, form: Any, says: str) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        complete(server, PROMPTS[0], extra_body={"response_format": form})
    assert str(refused.value.param).startswith("response_format")


CALL = '<tool_call>\n{"name": "leaves", "arguments": {"to": "Saltfern"}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "leaves", "parameters": {"type": "object"}}}]
ASK: Any = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello <tool", "Hello <tool", []),
        (CALL, "", ["leaves"]),
        (f"One moment. \n{CALL}\n{CALL}\n", "One moment.", ["leaves", "leaves"]),
        (f"{CALL} Done.", " Done.", ["leaves"]),
        (CALL.removesuffix("\n</tool_call>"), "", ["leaves"]),
        ('<tool_call>[{"name": "a"}, {"name": "b", "parameters": {}}]</tool_call>', "", ["a", "b"]),
        ("Yes: <tool_call>leaves(1)</tool_call>.", "Yes: <tool_call>leaves(1)</tool_call>.", []),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ("a < b\n\n<x>", "a < b\n\n<x>", []),
    ],
)
def test_tool_calls_are_parsed_alike_however_the_text_is_cut(text: str, content: str, calls: list[str]) -> None:
    cuts = [(text[:n], text[n:]) for n in range(len(text) + 1)]
    for pieces in [tuple(text), *cuts]:
        parser = ToolCallParser(single=False)
        found = [parser.add(piece, last=n == len(pieces) - 1) for n, piece in enumerate(pieces)]
        assert "".join(new for new, _ in found) == parser.content == content, pieces
        assert [call["function"]["name"] for _, new in found for call in new] == calls
        assert all(type(json.loads(call["function"]["arguments"])) is dict for call in parser.calls)
    parser = ToolCallParser(single=True)
    parser.add(text, last=True)
    assert [call["function"]["name"] for call in parser.calls] == calls[:1]


class Forced(LogitsProcessor):
    """Makes a sequence generate these tokens."""

    def __init__(self, prompt_length: int, tokens: list[int]) -> None:
        self._prompt_length, self._tokens = prompt_length, tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._tokens[input_ids.shape[1] - self._prompt_length]] = 0
        return forced


@pytest.fixture
def prompts(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts that the engine gets. What it generates is a text, a tool call, and the end token."""
    got: list[list[int]] = []
    submit = Engine.submit

    def forced(engine: Engine, prompt: list[int], **how: Any) -> Any:
        got.append(prompt)
        tokens = server.tokenizer(f"See.\n{CALL}", add_special_tokens=False)["input_ids"]
        processor = Forced(len(prompt), [*tokens, server.tokenizer.eos_token_id])
        return submit(engine, prompt, **how, logits_processor=LogitsProcessorList([processor]))

    monkeypatch.setattr(Engine, "submit", forced)
    return got


def test_tools_are_rendered_by_the_template_and_calls_are_returned(server: Server, prompts: list[list[int]]) -> None:
    how: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": TOOLS, "max_tokens": 99}
    choice = server.client.chat.completions.create(**how).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "See."
    (call,) = choice.message.tool_calls or []
    assert (call.type, call.function.name) == ("function", "leaves")  # type: ignore[union-attr]
    assert json.loads(call.function.arguments) == {"to": "Saltfern"}  # type: ignore[union-attr]
    answer = [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "9.40"},
    ]
    with server.client.chat.completions.stream(**{**how, "messages": [*ASK, *answer]}) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "See."
    assert [c.function.arguments for c in final.message.tool_calls or []] == [call.function.arguments]  # type: ignore[union-attr]
    expected = [
        server.tokenizer.apply_chat_template([*ASK, *more], tools=TOOLS, tokenize=False)
        for more in ([], _as_objects(answer))
    ]
    assert [server.tokenizer.decode(prompt) for prompt in prompts] == expected
    cut = server.client.chat.completions.create(**{**how, "max_tokens": 8}).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
    without = server.client.chat.completions.create(**how, tool_choice="none").choices[0]
    assert (without.finish_reason, without.message.content) == ("stop", f"See.\n{CALL}")
    assert server.tokenizer.decode(prompts[-1]) == server.tokenizer.apply_chat_template(ASK, tokenize=False)


def _as_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of their calls as templates get them."""
    messages = copy.deepcopy(messages)
    for call in messages[0]["tool_calls"]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tool_choice": "required"}, 'tool_choice is "required": it must be'),
        ({"tool_choice": {"type": "function", "function": {"name": "leaves"}}}, "tool_choice is an object"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, 'tools.0.type is "custom"'),
        ({"response_format": FORMAT}, "response_format is json_schema beside tools"),
    ],
)
def test_tools_that_cannot_be_called_are_refused(server: Server, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        server.client.chat.completions.create(**{"model": "tiny", "messages": ASK, "tools": TOOLS, **fields})


def test_tools_need_a_template_whose_calls_can_be_parsed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for template in ("{% for m in messages %}{{ m.content }}{% endfor %}", "{{ tools }}[TOOL_CALLS]"):
        monkeypatch.setattr(server.tokenizer, "chat_template", template)
        with pytest.raises(openai.BadRequestError, match="tools are given: this checkpoint's chat template") as refused:
            server.client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
        assert refused.value.param == "tools"


def test_what_open_webui_sends_is_answered(server: Server) -> None:
    """As in `generate_chat_completion` of its backend/open_webui/routers/openai.py, and its task of finding a title."""
    assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == ["tiny"]
    part = {"type": "text", "text": "vehicle: tram", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "vehicle: ferry"},
        {"role": "assistant", "content": "The ferry.", "reasoning_content": "A ferry is asked for."},
        {"role": "user", "content": [part]},
    ]
    parameters = {"temperature": 0.8, "top_p": 0.9, "seed": 3, "frequency_penalty": 0.5, "presence_penalty": 0.5}
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "stop": ["."], "logit_bias": {"5": 1}, **parameters}
    whole = server.post(True, {**body, "stream": False}).json()
    streamed = server.post(True, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert streamed.headers["Content-Type"].startswith("text/event-stream")
    *events, done, _ = streamed.text.split("\n\n")
    assert done == "data: [DONE]"
    *parts, last = [json.loads(event.removeprefix("data: ")) for event in events]
    assert last["usage"] == whole["usage"]
    text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
    assert text == whole["choices"][0]["message"]["content"]
    title = {"model": "tiny", "messages": messages[-1:], "stream": False, "max_completion_tokens": 16}
    assert server.text(True, title)


def test_without_an_echo_at_least_one_token_is_generated(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=r"max_tokens is 0: it must be .* unless echo is true"):
        complete(server, PROMPTS[0], max_tokens=0)
