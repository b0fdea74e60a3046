"""Requests as OpenAI's client, vLLM's users, browsers and curl send them, and invalid ones."""

import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
import typing_extensions
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from served_checkpoints import COMPLETIONS, Server, started
from small_checkpoints import save_checkpoint

from skipdecode import ConfigError
from skipdecode.serve.ignored_fields import NEUTRAL, UNUSED
from skipdecode.serve.protocol import ChatRequest, CompletionRequest
from skipdecode.serve.settings import ServeSettings

PROMPT = "vehicle: ferry | to: Saltfern\n"
CALL = {"id": "1", "type": "function", "function": {"name": "timetable", "arguments": '{"to": "Saltfern"}'}}
USER = {"role": "user", "content": "vehicle: tram"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("served") / "tiny", 2)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with started(checkpoint) as found:
        yield found


def request(chat: bool, **fields: Any) -> dict[str, Any]:
    """A valid request with these fields in addition."""
    return {"model": "tiny", **({"messages": [USER]} if chat else {"prompt": PROMPT}), **fields}


def refusal(answer: httpx.Response) -> dict[str, Any]:
    """The error of a response with status 400, checked to have OpenAI's form."""
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_an_assistant_message_with_tool_calls_needs_no_content(server: Server, content: Any) -> None:
    turn = {"role": "assistant", "tool_calls": [CALL], **content}
    result = {"role": "tool", "tool_call_id": "1", "content": "9.40"}
    answer = server.client.chat.completions.create(model="tiny", messages=[USER, turn, result])  # type: ignore[list-item]
    rendered = 'user: vehicle: tram\nassistant: [timetable {"to": "Saltfern"}]\ntool: 9.40\n'
    assert answer.choices[0].message.content == server.text_of(rendered)


def test_a_response_can_be_sent_back_as_the_client_dumps_it(server: Server) -> None:
    message = server.client.chat.completions.create(model="tiny", messages=[USER]).choices[0].message  # type: ignore[list-item]
    dumped = message.model_dump()
    assert dumped["tool_calls"] is None
    answer = server.client.chat.completions.create(model="tiny", messages=[USER, dumped, USER])  # type: ignore[list-item]
    rendered = f"user: vehicle: tram\nassistant: {message.content}\nuser: vehicle: tram\n"
    assert answer.choices[0].message.content == server.text_of(rendered)


@pytest.mark.parametrize(
    ("message", "rendered"),
    [
        ({"role": "assistant", "content": "a", "tool_calls": []}, "assistant: a\n"),
        ({"role": "assistant", "content": None, "refusal": "No."}, "assistant: No.\n"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "assistant: No.\n"),
        ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}}, "assistant: \n"),
        ({"role": "assistant", "content": "a", "reasoning": "b"}, "assistant: a\n"),
        ({"role": "assistant", "content": None, "reasoning": "b"}, "assistant: \n"),
        ({"role": "assistant", "reasoning_content": "b"}, "assistant: \n"),
        ({"role": "function", "name": "f", "content": None}, "function: \n"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "f", "input": "a"}}]},
            "assistant: \n",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "to:"}}]},
            'assistant: [f "to:"]\n',  # a model may write invalid JSON
        ),
        ({"role": "user", "content": [{"type": "text", "text": "a", "prompt_cache_breakpoint": {}}]}, "user: a\n"),
    ],
)
def test_the_chat_template_gets_the_content_of_each_message(server: Server, message: Any, rendered: str) -> None:
    found = server.text(True, {"model": "tiny", "messages": [USER, message]})
    assert found == server.text_of(f"user: vehicle: tram\n{rendered}")


@pytest.mark.parametrize(
    ("messages", "field", "says"),
    [
        ([], "messages", r"messages is \[\]: it must have at least 1 item"),
        ("hello", "messages", 'messages is "hello": it must be a list'),
        (["hello"], "messages.0", 'messages.0 is "hello": it must be an object'),
        ([{"content": "a"}], "messages.0.role", "messages.0.role is missing"),
        ([{"role": 5, "content": "a"}], "messages.0.role", "messages.0.role is 5: it must be a string"),
        ([{"role": "user"}], "messages.0.content", "messages.0.content is missing"),
        ([{"role": "user", "reasoning": "a"}], "messages.0.content", "messages.0.content is missing"),
        ([{"role": "user", "content": 5}], "messages.0.content", "it is 5, and must be a string or a list of parts"),
        ([{"role": "user", "content": ["a"]}], "messages.0.content.0", 'content.0 is "a": it must be an object'),
        ([{"role": "user", "content": [{"text": "a"}]}], "messages.0.content.0.type", "type is missing"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text", "text is missing"),
        ([USER, {**USER, "content": [{"type": "image_url"}]}], "messages.1.content.0", "only supported type is text"),
        ([{"role": "assistant", "audio": {"id": "a"}, "content": ""}], "messages.0.audio", "doesn't support"),
        ([{"role": "assistant", "tool_calls": "f"}], "messages.0.tool_calls", "it must be a list"),
        ([{"role": "assistant", "tool_calls": [5]}], "messages.0.tool_calls.0", "is 5: it must be an object"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages.0.tool_calls.0.function.name", "missing"),
    ],
)
def test_an_invalid_message_is_refused_and_named(server: Server, messages: Any, field: str, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as found:
        server.client.chat.completions.create(model="tiny", messages=messages)
    assert found.value.param == field
    assert "more" not in found.value.message


def test_an_error_about_the_length_names_the_field_that_the_request_used(server: Server) -> None:
    error = refusal(server.post(True, request(True, max_completion_tokens=5000)))
    assert error["message"] == "max_completion_tokens is 5000: the maximum on this server is 1024"
    assert error["param"] == "max_completion_tokens"


def test_deeply_nested_messages_do_not_crash_the_server(server: Server) -> None:
    deep: Any = "a"
    for _ in range(900):
        deep = [deep]
    call = {**CALL, "function": {"name": "f", "arguments": {"a": deep}}}
    for message in ({**USER, "extra": deep}, {"role": "assistant", "tool_calls": [call]}):
        assert server.post(True, request(True, messages=[message])).status_code in (200, 400)


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"details": True}, {"n": 2, "temperature": 1}])
@pytest.mark.parametrize("chat", [False, True])
def test_with_include_usage_every_chunk_has_the_field_and_only_the_last_has_counts(
    server: Server, chat: bool, fields: dict[str, Any]
) -> None:
    if "logprobs" in fields and not chat:
        fields = {"logprobs": 1}
    whole = server.post(chat, request(chat, seed=3, **fields)).json()
    for options in ({"include_usage": True}, {"include_usage": False}, {}, None):
        answer = server.post(chat, request(chat, seed=3, **fields, stream=True, stream_options=options))
        *events, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        parts = [json.loads(event.removeprefix("data: ")) for event in events]
        if options is not None and options.get("include_usage"):
            *parts, last = parts
            assert last["choices"] == []
            assert last["usage"] == whole["usage"]
            assert all("usage" in part and part["usage"] is None for part in parts)
        else:
            assert not any("usage" in part for part in parts)
        ends = [choice["finish_reason"] for part in parts for choice in part["choices"] if choice["finish_reason"]]
        assert len(ends) == fields.get("n", 1)


def neutral_fields(chat: bool) -> list[tuple[str, Any]]:
    table = (ChatRequest if chat else CompletionRequest).neutral
    examples = {str: "a", dict: {"mode": "implicit", "ttl": "30m"}}
    fields = [(name, value) for name, values in table.items() for value in values]
    return [
        *fields,
        *((name, examples[kind]) for name, kind in UNUSED.items()),
        ("frequency_penalty", 0.0),
        ("presence_penalty", 0),
        ("top_k", -1),
        ("top_k", 0),
        ("top_p", 0),
        ("max_tokens", 4.0),
        ("stream_options", {"include_usage": False}),
        ("stop", []),
        ("logit_bias", {}),
    ]


@pytest.mark.parametrize("chat", [False, True])
def test_a_field_with_a_value_without_effect_changes_nothing(server: Server, chat: bool) -> None:
    plain = server.text(chat, request(chat))
    for name, value in neutral_fields(chat):
        assert server.text(chat, request(chat, **{name: value})) == plain, name
    fields = [*ChatRequest.model_fields, *CompletionRequest.model_fields, *NEUTRAL, *UNUSED, "anything"]
    nulls = {name: None for name in fields if name not in ("model", "messages", "prompt")}
    assert server.text(chat, request(chat, **nulls)) == plain


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("metadata", {"a": "b"}, r"metadata is an object: this server doesn't support it, and accepts only \{\}"),
        ("modalities", ["text", "audio"], "modalities is a list"),
        ("min_p", 0.1, "min_p is 0.1: this server doesn't support it, and accepts only 0, which has no effect"),
        ("min_p", False, "min_p is false"),
        ("ignore_eos", 0, "ignore_eos is 0"),
        ("tool_choice", "required", 'tool_choice is "required": '),
        ("guided_json", {}, "guided_json is {}: this server doesn't support it$"),
        ("user", 5, "user is 5: it must be a string"),
        ("prompt_cache_options", "a", 'prompt_cache_options is "a": it must be an object'),
        ("n", True, "n is true: it must be an integer"),
        ("n", 2.5, "n is 2.5: it must be an integer"),
        ("temperature", "hot", 'temperature is "hot": it must be a number'),
        ("stream", "yes", 'stream is "yes": it must be true or false'),
        ("stream_options", True, "stream_options is true: it must be an object"),
        ("stream_options", {"include_usage": True}, "stream_options is given without stream"),
        ("stream_options", {"usage": True}, "stream_options.usage is not a known field"),
        ("seed", 2**70, "seed is 1180591620717411303424"),
        ("max_tokens", 5000, "max_tokens is 5000: the maximum on this server is 1024"),
        ("logit_bias", {"a\n": 1}, r'logit_bias.a\\n is "a\\n": it must be an integer'),
        ("top_k", -2, "top_k is -2: it must be greater than or equal to -1"),
        ("stop", 5, "stop: it is 5, and must be a string or a list of strings"),
        ("stop", ["a", 5], "stop: an entry is 5, and must be a string"),
        ("stop", [""], "stop: a string has 0 characters, and must have 1 to 256"),
        ("stop", ["a"] * 17, "stop: it has 17 entries: the maximum is 16"),
        ("logit_bias", [5], "logit_bias is a list: it must be an object"),
        ("logit_bias", {"5": "much"}, 'logit_bias.5 is "much": it must be a number'),
        ("over", "decoding", "over is \"decoding\": it must be 'decode' or 'all'"),
        ("sped_up", 3, "sped_up is not a known field: did you mean speedup"),
        ("model", 5, "model is 5: it must be a string"),
        ("model", None, "model is missing"),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
def test_an_invalid_or_unsupported_field_is_named_with_its_value(
    server: Server, chat: bool, field: str, value: Any, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as found:
        (server.client.chat.completions if chat else server.client.completions).create(  # type: ignore[call-overload]
            **request(chat), extra_body={field: value}
        )
    assert str(found.value.param).split(".")[0] == field


def test_a_field_of_the_other_endpoint_is_named_with_that_endpoint(server: Server) -> None:
    error = refusal(server.post(False, {"model": "tiny", "messages": [USER]}))
    assert error["message"] == "messages is not a known field: it belongs to /v1/chat/completions"
    assert refusal(server.post(True, {"model": "tiny", "prompt": "a"}))["param"] == "prompt"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (None, "prompt is missing"),
        (5, "prompt: it is 5, and must be a string, a list of strings, a list of token ids, or a list of such lists"),
        ({"a": 1}, "prompt: it is an object"),
        ([], "prompt: it is empty"),
        (["a", 5], 'prompt: entry 1 is 5, but entry 0 is "a"'),
        ([[5], "a"], 'prompt: entry 1 is "a", but entry 0 is a list'),
        ([5, True], "prompt: entry 1 is true, but entry 0 is 5"),
        ([None], "prompt: entry 0 is null"),
        ([5, -1], "prompt: entry 1 is -1, and a token id is an integer of at least 0"),
        ([[5], [6, "a"]], 'prompt: entry 1, entry 1 is "a", and a token id is an integer'),
        ([[5], []], "the prompt is empty"),
        ([99999], "the prompt holds token 99999"),
        ("a " * 400, "lower max_tokens"),
    ],
)
def test_an_invalid_prompt_gets_an_error_that_says_what_is_wrong(server: Server, prompt: Any, says: str) -> None:
    error = refusal(server.post(False, {"model": "tiny", "prompt": prompt, "max_tokens": 4}))
    assert says in error["message"]
    assert error["param"] == "prompt"


def drawn(kind: Any) -> st.SearchStrategy[Any]:
    """JSON values of one of the openai package's types."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing_extensions.Required, typing_extensions.NotRequired):
        return drawn(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return st.one_of([drawn(each) for each in arguments])
    if origin is Literal or origin is typing_extensions.Literal:
        return st.sampled_from(arguments)
    if typing_extensions.is_typeddict(kind):
        hints = typing_extensions.get_type_hints(kind)
        required = {name: st.deferred(lambda n=name: drawn(hints[n])) for name in sorted(kind.__required_keys__)}
        optional = {name: st.deferred(lambda n=name: drawn(hints[n])) for name in sorted(kind.__optional_keys__)}
        return st.fixed_dictionaries(required, optional=optional)
    if origin is dict:
        return st.dictionaries(st.one_of(drawn(arguments[0]), st.just("5")), drawn(arguments[1]), max_size=2)
    if origin is not None:  # Iterable, Sequence, List
        return st.lists(drawn(arguments[0]), max_size=2)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(st.characters(codec="utf-8"), max_size=4),
        int: st.one_of(st.integers(0, 4), st.integers(-(2**70), 2**70)),
        float: st.floats(-3, 3, allow_nan=False),
        bool: st.booleans(),
        object: st.none(),
        type(None): st.none(),
    }
    return simple[kind]


def drawn_requests(chat: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Requests with up to three of the optional fields."""
    module = chat_create_params if chat else completion_create_params
    hints = typing_extensions.get_type_hints(module.CompletionCreateParamsBase)
    required = {"messages" if chat else "prompt"}
    fields = {name: drawn(kind) for name, kind in hints.items() if name != "model"}
    fields["stream"] = st.booleans()
    optional = st.lists(st.sampled_from(sorted(fields.keys() - required)), max_size=3, unique=True)
    right = st.just([USER] if chat else PROMPT)

    def of(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
        needed = {name: st.one_of(right, fields[name]) for name in required}
        return st.fixed_dictionaries({"model": st.just("tiny"), **needed, **{n: fields[n] for n in names}})

    return optional.flatmap(of)


def check_answer(body: dict[str, Any], answer: httpx.Response) -> None:
    """Check that a request got a response, or an error that names one of its fields."""
    if answer.status_code == 200:
        if body.get("stream"):
            *events, done, _ = answer.text.split("\n\n")
            assert done == "data: [DONE]"
            assert all("error" not in json.loads(event.removeprefix("data: ")) for event in events)
        else:
            assert answer.json()["choices"]
        return
    error = refusal(answer)
    field = str(error["param"]).split(".")[0]
    assert field in body, error
    assert field in error["message"] or field == "messages", error


@pytest.mark.parametrize("chat", [False, True])
def test_any_request_of_openais_types_gets_a_response_or_an_error_that_names_a_field(
    server: Server, chat: bool
) -> None:
    @settings(max_examples=100, deadline=None)
    @given(drawn_requests(chat))
    def check(body: dict[str, Any]) -> None:
        check_answer(body, server.post(chat, body))

    check()


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(-1e9, 1e9), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)


@pytest.mark.parametrize("chat", [False, True])
def test_any_json_in_any_field_gets_a_response_or_an_error_that_names_it(server: Server, chat: bool) -> None:
    names = sorted({*(ChatRequest if chat else CompletionRequest).model_fields, *NEUTRAL, *UNUSED})

    @settings(max_examples=100, deadline=None)
    @example("model", "\ud800")
    @example("\ud800", 1)
    @given(st.one_of(st.sampled_from(names), st.text(max_size=3)), JSON)
    def check(name: str, value: Any) -> None:
        body = request(chat, **{name: value})
        answer = server.post(chat, body)
        if name == "model" and isinstance(value, str):
            assert answer.status_code == 404
        elif name.isprintable() and "." not in name:
            check_answer(body, answer)
        else:
            assert answer.status_code in (200, 400)

    check()


def test_every_field_of_openais_requests_is_implemented_or_listed_as_unsupported() -> None:
    for chat, model in ((True, ChatRequest), (False, CompletionRequest)):
        module = chat_create_params if chat else completion_create_params
        hints = typing_extensions.get_type_hints(module.CompletionCreateParamsBase)
        assert hints.keys() <= {*model.model_fields, *model.neutral, *UNUSED}


@pytest.mark.parametrize("kind", [None, "text/plain", "application/json", "nonsense"])
def test_a_json_body_is_read_whatever_its_content_type(server: Server, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    body = json.dumps(request(False)).encode()
    answer = server.http.post(COMPLETIONS, content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    page = server.http.post(COMPLETIONS, content=body, headers={**headers, "Origin": "https://elsewhere.example"})
    # Browsers send other content types to other servers without asking for permission first.
    assert page.status_code == (200 if kind == "application/json" else 415)


@pytest.mark.parametrize("kind", [None, "application/json"])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body is empty: it must be a JSON object"),
        (b"null", "the body is null: it must be an object"),
        (b"{", "the body is not valid JSON: Expecting property name enclosed in double quotes at character 1"),
        (b"\xff\xfe\xff", "the body is not valid JSON: 'utf-16"),
        (b'{"model": "\xe9"}', "the body is not valid JSON: 'utf-8' codec can't decode byte 0xe9"),
        (b'{"n": ' + b"1" * 5000 + b"}", "the body is not valid JSON: Exceeds the limit"),
        (b"[" * 100_000, "the body is not valid JSON: maximum recursion depth exceeded"),
        (b"[1, 2]", "the body is a list: it must be an object"),
        (b"{}", "model is missing (and 1 more)"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "temperature is NaN: it must be"),
        (b'{"model": "tiny", "prompt": "a", "speedup": Infinity}', "speedup is inf"),
    ],
)
def test_a_body_that_is_no_json_object_gets_an_error_that_says_why(
    server: Server, body: bytes, says: str, kind: str | None
) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    answer = server.http.post(COMPLETIONS, content=body, headers=headers)
    assert says in refusal(answer)["message"]


def test_an_unknown_endpoint_gets_an_error_that_names_the_endpoints(server: Server) -> None:
    answer = server.http.post("/v1/responses", json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        "POST /v1/responses doesn't exist: there are /v1/models, /v1/completions and /v1/chat/completions"
    )
    answer = server.http.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["message"] == "GET /v1/completions is not allowed: the method is POST"


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models", "/v1/models/tiny"])
def test_everything_that_get_serves_is_served_to_head_too(server: Server, path: str) -> None:
    answer = server.http.head(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["Content-Type"] == server.http.get(path).headers["Content-Type"]


def test_only_web_pages_of_allowed_origins_may_use_the_server(checkpoint: Path, server: Server) -> None:
    origin, other = "https://example.org", "https://elsewhere.example"
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}
    with started(checkpoint, allow_origins=(origin,), api_key="secret") as found:
        permitted = found.http.options(COMPLETIONS, headers={"Origin": origin, **asking})  # browsers send no key here
        assert permitted.status_code == 200
        assert permitted.headers["Access-Control-Allow-Origin"] == origin
        assert permitted.headers["Access-Control-Allow-Headers"] == asking["Access-Control-Request-Headers"]
        refused = found.http.options(COMPLETIONS, headers={"Origin": other, **asking})
        assert "Access-Control-Allow-Origin" not in refused.headers
        key = {"Authorization": "Bearer secret"}
        for headers, status in ((key, 200), ({}, 401)):
            answer = found.http.post(COMPLETIONS, json=request(False), headers={"Origin": origin, **headers})
            assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (status, origin)
        answer = found.http.post(COMPLETIONS, json=request(False), headers={"Origin": other, **key})
        assert "Access-Control-Allow-Origin" not in answer.headers
    with started(checkpoint, allow_origins=("*",)) as found:
        answer = found.http.post(COMPLETIONS, json=request(False), headers={"Origin": other})
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
    assert server.http.options(COMPLETIONS, headers={"Origin": origin, **asking}).status_code == 405
    assert "Access-Control-Allow-Origin" not in server.http.get("/health", headers={"Origin": origin}).headers


def test_an_origin_that_no_browser_sends_is_refused_as_a_setting() -> None:
    for origin in ("", "example.org", "https://example.org/", "https://*.example.org", "null"):
        with pytest.raises(ConfigError, match=r"--allow-origin is .* an origin as browsers send it"):
            ServeSettings("tiny", allow_origins=(origin,))


def test_the_openapi_description_lists_the_fields_of_requests(server: Server) -> None:
    schema = server.http.get("/openapi.json").json()
    fields = schema["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "stop", "speedup"} <= fields.keys()
