"""A server process, called by OpenAI's client and by plain HTTP clients."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import torch
from server_processes import announced_address
from small_checkpoints import save_checkpoint
from starlette.testclient import TestClient

import skipdecode
from skipdecode import ConfigError, Engine, SkipSchedule
from skipdecode.checkpoint.skip_config import CONFIG_KEY, SkipConfig
from skipdecode.cli.options import command_parser
from skipdecode.engine.engine import EngineState
from skipdecode.serve.app import make_app
from skipdecode.serve.metrics import Metrics, merged_page
from skipdecode.serve.responses import server_sent_event
from skipdecode.serve.settings import ServerOptions, ServeSettings

ROOT = Path(__file__).resolve().parents[2]
KEY = "a key of the tests"
PROMPTS = ["vehicle: ferry | to: Saltfern\n", "vehicle: train | to: Mossford | leaves: 9.40\n", "vehicle: tram\n"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
NEW = 12


class Server(NamedTuple):
    folder: Path
    process: "subprocess.Popen[str]"
    address: str
    client: openai.OpenAI

    def running(self) -> int:
        page = httpx.get(f"{self.address}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
        return int(sum(float(found) for found in re.findall(r"^skipdecode_(?:running|waiting) (.+)$", page, re.M)))


@contextmanager
def started(folder: Path, *more: str) -> Iterator[Server]:
    """A server process that serves a checkpoint until the block ends."""
    script = ROOT / "tests" / "support" / "slow_server.py"
    options = ["--speedup", "2", "--port", "0", "--rows", "4", "--queue", "6", "--max-new-tokens", str(NEW), *more]
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder), *options],
        env={**os.environ, "SKIPDECODE_API_KEY": KEY},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        address = announced_address(process)
        while True:
            try:
                if httpx.get(f"{address}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.05)
        yield Server(folder, process, address, openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0))
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = save_checkpoint(tmp_path_factory.mktemp("served") / "tiny", 6)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    with started(folder) as found:
        yield found


def alone(server: Server, prompt: str, speedup: float, **settings: Any) -> list[int]:
    """The new tokens that `skip_generate` gives for this prompt."""
    model, tokenizer = skipdecode.load(str(server.folder))
    inputs = tokenizer([prompt], return_tensors="pt")
    settings = {"max_new_tokens": NEW, "do_sample": False, **settings}
    out = model.generate(**inputs, custom_generate=skipdecode.skip_generate, speedup=speedup, **settings)
    found: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
    return found


def text_of(server: Server, tokens: list[int]) -> str:
    tokenizer: Any = skipdecode.load(str(server.folder))[1]
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def test_each_request_of_a_batch_decodes_at_its_own_speedup(server: Server) -> None:
    requests = [(prompt, speedup) for prompt in PROMPTS for speedup in (1, 2, 3)]

    def send(request: tuple[str, float]) -> Any:
        prompt, speedup = request
        extra = {"speedup": speedup, "details": True}
        return server.client.completions.create(model="tiny", prompt=prompt, extra_body=extra)

    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(send, requests))
    for (prompt, speedup), answer in zip(requests, found, strict=True):
        tokens = alone(server, prompt, speedup)
        assert answer.choices[0].text == text_of(server, tokens)
        assert answer.usage.completion_tokens == len(tokens)
        assert answer.choices[0].finish_reason == ("length" if len(tokens) == NEW else "stop")
    assert len({answer.choices[0].text for answer in found[:3]}) > 1, "all speedups gave the same output"
    layers = [answer.skipdecode["layers_per_token"] for answer in found[:3]]
    assert layers[0] == 6 > layers[1] > layers[2]


@pytest.mark.parametrize("speed", [{}, {"speedup": 3}])
def test_lossless_output_is_that_of_full_depth(server: Server, speed: dict[str, float]) -> None:
    extra = {"lossless": True, **speed}
    found = [server.client.completions.create(model="tiny", prompt=prompt, extra_body=extra) for prompt in PROMPTS]
    assert [each.choices[0].text for each in found] == [text_of(server, alone(server, prompt, 1)) for prompt in PROMPTS]


def test_the_servers_speedup_is_the_default_and_a_request_may_have_several_prompts(server: Server) -> None:
    answer = server.client.completions.create(model="tiny", prompt=PROMPTS)
    assert [c.text for c in answer.choices] == [text_of(server, alone(server, prompt, 2)) for prompt in PROMPTS]
    tokens = skipdecode.load(str(server.folder))[1](PROMPTS[0])["input_ids"]
    of_tokens = server.client.completions.create(model="tiny", prompt=tokens)
    assert of_tokens.choices[0].text == answer.choices[0].text
    assert server.client.models.list().data[0].id == "tiny"


def test_a_stream_gives_the_same_text_as_a_full_response_and_ends_with_the_usage(server: Server) -> None:
    whole = server.client.completions.create(model="tiny", prompt=PROMPTS[0])
    stream = server.client.completions.create(
        model="tiny", prompt=PROMPTS[0], stream=True, stream_options={"include_usage": True}
    )
    *parts, last = list(stream)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert len(parts) > 3
    assert [part.choices[0].finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage == whole.usage


def test_an_event_is_one_line_for_clients_that_split_at_unicode_line_ends() -> None:
    body = {"text": "\u2028, \u2029 and \x85"}
    line, *rest = server_sent_event(body).splitlines()
    assert json.loads(line.removeprefix("data: ")) == body
    assert rest == [""]


def test_a_chat_decodes_the_text_of_its_template(server: Server) -> None:
    messages: Any = [{"role": "user", "content": "vehicle: tram"}]
    tokenizer = skipdecode.load(str(server.folder))[1]
    tokens = tokenizer("user: vehicle: tram\n", add_special_tokens=False)["input_ids"]
    plain = server.client.completions.create(model="tiny", prompt=tokens)
    answer = server.client.chat.completions.create(model="tiny", messages=messages)
    assert answer.choices[0].message.content == plain.choices[0].text
    assert answer.choices[0].message.role == "assistant"
    parts = list(server.client.chat.completions.create(model="tiny", messages=messages, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == plain.choices[0].text


def test_a_seed_gives_the_samples_of_skip_generate_and_the_n_samples_differ(server: Server) -> None:
    how: Any = {"model": "tiny", "prompt": PROMPTS[1], "temperature": 1.3, "seed": 11, "n": 3}
    answer = server.client.completions.create(**how)
    expected = []
    for n in range(3):
        torch.manual_seed(11 + n)
        tokens = alone(server, PROMPTS[1], 2, do_sample=True, temperature=1.3, top_k=0, top_p=1.0)
        expected.append(text_of(server, tokens))
    assert [choice.text for choice in answer.choices] == expected
    assert len(set(expected)) == 3
    streamed = ["", "", ""]
    for part in server.client.completions.create(**how, stream=True):
        streamed[part.choices[0].index] += part.choices[0].text
    assert streamed == expected


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_ends_before_a_stop_string(server: Server, stream: bool) -> None:
    whole = text_of(server, alone(server, PROMPTS[0], 2))
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    answer: Any = server.client.completions.create(model="tiny", prompt=PROMPTS[0], stop=["never", stop], stream=stream)
    choices = [part.choices[0] for part in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"


@contextmanager
def here(server: Server, **generation_config: Any) -> Iterator[tuple[TestClient, Engine]]:
    """A server in this process with the same checkpoint and these generation settings."""
    model, tokenizer = skipdecode.load(str(server.folder))
    for name, value in generation_config.items():
        setattr(model.generation_config, name, value)
    engine = Engine(model, tokenizer)
    with TestClient(make_app(engine, tokenizer, ServeSettings("tiny"))) as client:
        yield client, engine


def test_the_checkpoints_own_stop_strings_end_a_sequence(server: Server) -> None:
    tokens = alone(server, PROMPTS[0], 1)
    stop = text_of(server, tokens[3:5])
    with here(server, stop_strings=[stop]) as (client, _):
        answer = client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPTS[0], "max_tokens": NEW})
    assert answer.json()["choices"][0]["text"] == text_of(server, tokens[:5])
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    with here(server, token_healing=True) as (client, _):
        answer = client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPTS[0]})
    assert answer.status_code == 400
    assert "token_healing is True" in answer.json()["error"]["message"]


def test_a_server_whose_engine_has_stopped_is_unavailable(server: Server) -> None:
    with here(server) as (client, engine):
        engine.close()
        answers = [client.get("/health"), client.post("/v1/completions", json={"model": "tiny", "prompt": "a"})]
    assert [answer.status_code for answer in answers] == [503, 503]
    assert answers[1].json()["error"]["code"] == "shutting_down"


def test_logprobs_are_reported_for_every_token(server: Server) -> None:
    answer = server.client.completions.create(model="tiny", prompt=PROMPTS[0], logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    tokens = alone(server, PROMPTS[0], 2)
    assert len(found.token_logprobs) == len(tokens)
    assert found.token_logprobs == [max(top.values()) for top in found.top_logprobs]  # greedy
    chat = server.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert all(len(each.top_logprobs) == 3 and each.logprob <= 0 for each in content)


def test_logprobs_in_a_stream_are_those_of_the_full_response(server: Server) -> None:
    text = text_of(server, alone(server, PROMPTS[0], 2))
    stop = [text[:8] + "never", text[9:11]]  # text that may begin the first one is held back
    how: Any = {"model": "tiny", "prompt": PROMPTS[0], "logprobs": 2, "stop": stop}
    found = server.client.completions.create(**how).choices[0].logprobs
    parts = [part.choices[0].logprobs for part in server.client.completions.create(**how, stream=True)]
    assert len(parts) > 3
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [each for part in parts for each in getattr(part, name)] == getattr(found, name)


def test_the_bytes_of_all_tokens_together_are_the_text(server: Server) -> None:
    answer = server.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=0
    )
    raw = b"".join(bytes(each.bytes) for each in answer.choices[0].logprobs.content)  # type: ignore[union-attr,arg-type]
    assert b"\xab" in raw  # random weights: most bytes form no valid character
    assert raw.decode(errors="replace") == answer.choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "other"}, "the model 'other' is not served here"),
        ({"prompt": ""}, "the prompt is empty|at least one token"),
        ({"max_tokens": 0}, "max_tokens is 0: it must be greater than or equal to 1"),
        ({"n": 7}, "1 prompts with n = 7 are 7 sequences: a request may have at most 6"),
        ({"temperature": 9}, "temperature"),
        ({"logit_bias": {"999999": 5}}, "logit_bias names token 999999: the model's token ids go from 0 to 319"),
        ({"extra_body": {"repetition_penalty": 1e-45}, "temperature": 1}, "repetition_penalty"),
        ({"extra_body": {"top_k": 5}}, "top_k is 5 without temperature or top_p"),
        ({"extra_body": {"speedup": 90}}, "reaches at most"),
        ({"extra_body": {"speedup": 0.5}}, "speedup is 0.5"),
        ({"stop": ["a" * 257]}, "stop"),
    ],
)
def test_an_invalid_request_gets_an_error_in_openais_form(server: Server, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.APIStatusError, match=message) as found:
        server.client.completions.create(**{"model": "tiny", "prompt": PROMPTS[0], **fields})
    assert isinstance(found.value, openai.NotFoundError if "model" in fields else openai.BadRequestError)
    assert isinstance(found.value.body, dict)
    assert {"message", "type", "param", "code"} <= found.value.body.keys()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"model": "tiny", "prompt": "\\ud800"}', 400),
        (b'{"model": "tiny", "prompt": "' + b"a" * 2**20 + b'"}', 413),
    ],
)
def test_a_body_that_is_no_request_is_refused(server: Server, body: bytes, status: int) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for content in (body, iter([body])):  # with a length, and in chunks without one
        answer = httpx.post(f"{server.address}/v1/completions", content=content, headers=headers)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_logprobs": 3}, "top_logprobs is 3 without logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens is 3, and max_completion_tokens is 4"),
        ({"top_logprobs": 0, "max_tokens": 3, "max_completion_tokens": 3}, None),  # some clients send this by default
    ],
)
def test_chat_fields_without_effect_are_refused(server: Server, fields: dict[str, Any], message: str | None) -> None:
    chat: Any = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], **fields}
    if message is None:
        assert server.client.chat.completions.create(**chat).choices
    else:
        with pytest.raises(openai.BadRequestError, match=message):
            server.client.chat.completions.create(**chat)


def test_without_max_tokens_a_sequence_may_fill_the_remaining_positions(server: Server) -> None:
    prompt = [5] * 120  # of 128
    answer = server.client.completions.create(model="tiny", prompt=prompt)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 9
    with pytest.raises(openai.BadRequestError, match="positions are needed and the model has 128"):
        server.client.completions.create(model="tiny", prompt=prompt, max_tokens=10)


@pytest.mark.parametrize("message", [{"role": "user", "content": "\ud800"}, {"role": "\ud800", "content": "a"}])
def test_messages_with_invalid_unicode_are_refused(server: Server, message: dict[str, str]) -> None:
    body = json.dumps({"model": "tiny", "messages": [message]}).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    answer = httpx.post(f"{server.address}/v1/chat/completions", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["message"][:9]) == (400, "messages:")


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-6])
def test_tiny_temperatures_decode_greedily(server: Server, temperature: float) -> None:
    answer = server.client.completions.create(model="tiny", prompt=PROMPTS[0], temperature=temperature)
    assert answer.choices[0].text == text_of(server, alone(server, PROMPTS[0], 2))


def test_requests_without_the_api_key_are_refused(server: Server) -> None:
    for key in ("wrong", KEY[:-1], KEY + "a", "é"):
        headers = {"Authorization": f"Bearer {key}".encode()}
        for path in ("/v1/models", "/metrics", "/v1/completions"):
            answer = httpx.request("POST" if "comp" in path else "GET", server.address + path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.address}/v1", api_key="other", max_retries=0).models.list()


def test_requests_beyond_the_queue_get_429_and_leave_nothing_behind(server: Server) -> None:
    how: Any = {"n": 6, "temperature": 1, "max_tokens": 40, "logit_bias": {"2": -100}}

    def send(_: int) -> openai.RateLimitError | None:
        try:
            server.client.completions.create(model="tiny", prompt=PROMPTS[0], **how)
        except openai.RateLimitError as error:
            return error
        return None

    with ThreadPoolExecutor(4) as pool:  # 24 sequences, of which 10 decode or wait
        refused = [error for error in pool.map(send, range(4)) if error is not None]
    assert refused
    assert "the server is busy" in str(refused[0])
    assert refused[0].response.headers["Retry-After"] == "1"
    _wait_until_idle(server)
    server.client.completions.create(model="tiny", prompt=PROMPTS[0], n=4)


@pytest.mark.parametrize("stream", [False, True])
def test_the_sequences_of_a_client_that_disconnects_are_cancelled(server: Server, stream: bool) -> None:
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 100, "n": 3, "stream": stream}
    body |= {"logit_bias": {"2": -100}}  # no end token
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        if stream:
            with client.stream("POST", f"{server.address}/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{server.address}/v1/completions", json=body, timeout=0.2)
    assert _wait_until_idle(server) < 0.6  # the sequences would take a second


def _wait_until_idle(server: Server) -> float:
    start = time.monotonic()
    while server.running():
        assert time.monotonic() - start < 5
        time.sleep(0.01)
    return time.monotonic() - start


def test_the_page_loads_nothing_from_other_hosts(server: Server) -> None:
    answer = httpx.get(server.address)
    assert answer.status_code == 200
    assert not re.search(r"https?://|src=|@import|url\(", answer.text)
    assert "default-src 'none'; connect-src 'self'" in answer.headers["Content-Security-Policy"]
    known = re.search(r'<script type="application/json" id="known">(.*?)</script>', answer.text, re.S)
    assert known is not None
    assert json.loads(known[1])["model"] == "tiny"


def test_the_page_offers_only_speedups_that_can_be_reached(server: Server) -> None:
    model, tokenizer = skipdecode.load(str(server.folder))
    trained = {1.0: SkipSchedule.full_depth(6), 40.0: SkipSchedule(6, 1, 1)}
    task = {"name": "departures", "example": PROMPTS[1]}
    remembered = SkipConfig(schedules=trained, solver={"horizon": 8}, task=task)
    setattr(model.config, CONFIG_KEY, remembered.to_dict())
    engine = Engine(model)
    page = TestClient(make_app(engine, tokenizer, ServeSettings("tiny", over="all"))).get("/").text
    found = re.search(r'id="known">(.*?)</script>', page, re.S)
    assert found is not None
    fastest = json.loads(found[1])["fastest"]
    assert 1 < fastest < 40
    assert fastest % 0.25 == 0
    prompt = tokenizer(PROMPTS[1])["input_ids"]
    engine.submit(prompt, speedup=fastest, over="all", strict=True, max_new_tokens=4)
    with pytest.raises(ConfigError, match="at most"):
        engine.submit(prompt, speedup=fastest + 0.25, over="all", strict=True, max_new_tokens=4)


def test_metrics_count_requests_and_tokens(server: Server) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}

    def metrics() -> dict[str, float]:
        page = httpx.get(f"{server.address}/metrics", headers=headers).text
        return {name: float(value) for name, value in re.findall(r"^(\S+) ([-+\d.e]+)$", page, re.M)}

    server.client.completions.create(model="tiny", prompt=PROMPTS[0])
    before = metrics()
    answer = server.client.completions.create(model="tiny", prompt=PROMPTS[0])
    after = metrics()
    assert answer.usage is not None

    def increase(name: str) -> float:
        return after[name] - before[name]

    assert increase("skipdecode_tokens_total") == answer.usage.completion_tokens
    known = (answer.usage.prompt_tokens - 1) // 16 * 16  # whole blocks of tokens before the last one
    assert increase("skipdecode_prefix_tokens_total") == known > 0
    assert increase("skipdecode_prompt_tokens_total") == answer.usage.prompt_tokens - known
    assert after["skipdecode_prefix_bytes"] > 0
    assert increase("skipdecode_first_token_seconds_count") == 1
    assert increase("skipdecode_between_tokens_seconds_count") == answer.usage.completion_tokens - 1
    assert increase('skipdecode_requests_total{path="/v1/completions",status="200"}') == 1
    assert after["skipdecode_cache_columns"] == after["skipdecode_cache_columns_free"]


def test_after_sigterm_running_requests_end_normally_and_new_ones_get_503(server: Server) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 110, "logit_bias": {"2": -100}}
    stream = server.client.completions.create(**body, stream=True)
    next(iter(stream))
    server.process.send_signal(signal.SIGTERM)
    while httpx.get(f"{server.address}/health").status_code == 200:
        time.sleep(0.01)
    assert httpx.get(f"{server.address}/health").status_code == 503
    with pytest.raises(openai.InternalServerError, match="accepts no more requests") as refused:
        server.client.completions.create(**body)
    assert (refused.value.status_code, refused.value.response.headers["Retry-After"]) == (503, "1")
    parts = list(stream)
    assert parts[-1].choices[0].finish_reason == "length"
    assert server.process.wait(10) == 0


def test_requests_that_take_longer_than_the_drain_time_get_an_error(server: Server) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 110, "logit_bias": {"2": -100}}
    with started(server.folder, "--drain", "0.3") as ending, ThreadPoolExecutor(1) as pool:
        full = pool.submit(lambda: ending.client.completions.create(**body))
        stream = iter(ending.client.completions.create(stream=True, **body))
        next(stream)
        while ending.running() < 2:
            time.sleep(0.01)
        ending.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="the server is shutting down") as failed:
            full.result()
        assert failed.value.status_code == 503
        assert ending.process.wait(10) == 0
        assert ending.process.stderr is not None
        assert "Traceback" not in ending.process.stderr.read()


@pytest.mark.parametrize(
    ("options", "missing", "said"),
    [
        ([], "fastapi", "serving needs fastapi, which isn't installed: pip install 'skipdecode[serve]'"),
        (["--replicas", "2"], "ray", "--replicas needs ray, which isn't installed: pip install 'skipdecode[ray]'"),
    ],
)
def test_serving_without_the_extra_packages_names_what_is_missing(options: list[str], missing: str, said: str) -> None:
    code = (
        f"import sys\nsys.modules[{missing!r}] = None\nfrom skipdecode.cli.options import main\n"
        f"sys.exit(main(['serve', 'any', *{options}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {said}\n"


def test_options_of_the_server_are_those_of_the_command_with_their_defaults() -> None:
    parsed = vars(command_parser("serve").parse_args(["a-checkpoint"]))
    options = asdict(ServerOptions("a-checkpoint"))
    options["allow_origin"] = list(options["allow_origin"])
    assert options == {name: parsed[name] for name in options}
    assert parsed.keys() - options.keys() == {"host", "port", "run"}


def test_the_metrics_of_replicas_become_one_page_with_a_label() -> None:
    def served(paths: list[str]) -> bytes:
        metrics = Metrics(lambda: EngineState(**dict.fromkeys(EngineState.__dataclass_fields__, 3)))
        for path in paths:
            metrics.requests.labels(path, "200").inc()
        return metrics.own_page()

    lines = merged_page({"one": served(["/", "/", "/health"]), "two": served(["/"])}).decode().splitlines()
    assert {line for line in lines if re.match("skipdecode_(requests|tokens)_total", line)} == {
        'skipdecode_requests_total{path="/",replica="one",status="200"} 2.0',
        'skipdecode_requests_total{path="/health",replica="one",status="200"} 1.0',
        'skipdecode_requests_total{path="/",replica="two",status="200"} 1.0',
        'skipdecode_tokens_total{replica="one"} 3.0',
        'skipdecode_tokens_total{replica="two"} 3.0',
    }
    assert lines.count("# TYPE skipdecode_requests_total counter") == 1
