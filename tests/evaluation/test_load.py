"""The load test: arrivals, measurements against known delays, and the command run as a user would."""

import asyncio
import json
import math
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_checkpoints import save_checkpoint

import eval.load.report
import eval.load.run
from data import load_task
from eval.drawing import save_png
from eval.load import static_batching
from eval.load.arrivals import drawn_prompts, poisson_arrivals
from eval.load.cli import main
from eval.load.client import Endpoint, Outcome, play
from eval.load.report import Percentiles, row_of, throughput

FIRST, BETWEEN, TOKENS = 0.15, 0.06, 4  # seconds, seconds, parts of an answer
SLOW = pytest.mark.release  # `transformers serve` starts slowly
SEEN: list[dict[str, Any]] = []  # the bodies of all requests


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_arrivals_are_a_poisson_process(rate: float) -> None:
    arrivals = poisson_arrivals(rate, 20_000, seed=3)
    gaps = [b - a for a, b in pairwise(arrivals)]
    assert arrivals[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(1 / rate, rel=0.03)
    # Exponential gaps: a fraction of exp(-x) exceeds x times the mean, and consecutive gaps are independent.
    for times in (0.1, 0.5, 1.0, 2.0, 4.0):
        assert sum(gap > times / rate for gap in gaps) / len(gaps) == pytest.approx(math.exp(-times), abs=0.012)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03
    counts = Counter(int(arrival * rate / 10) for arrival in arrivals)  # windows of ten mean gaps
    spread = statistics.variance([counts[n] for n in range(1900)])
    assert spread == pytest.approx(10, rel=0.15)  # the variance of a Poisson count is its mean


def test_equal_seeds_give_equal_requests_and_different_seeds_different_ones() -> None:
    prompts = [str(n) for n in range(7)]
    assert poisson_arrivals(2.0, 50, seed=1) == poisson_arrivals(2.0, 50, seed=1) != poisson_arrivals(2.0, 50, seed=2)
    assert poisson_arrivals(math.inf, 3, seed=1) == [0.0, 0.0, 0.0]
    found = drawn_prompts(prompts, 20, seed=1)
    assert found == drawn_prompts(prompts, 20, seed=1) != drawn_prompts(prompts, 20, seed=2)
    assert sorted(found[:7]) == sorted(found[7:14]) == prompts
    assert found[:7] != found[7:14]
    # The rate only scales the arrival times.
    slow, fast = poisson_arrivals(1.0, 50, seed=5), poisson_arrivals(10.0, 50, seed=5)
    assert slow == pytest.approx([10 * arrival for arrival in fast])


def drawn_outcome(draw: random.Random) -> Outcome:
    parts: list[float] = []
    for _ in range(draw.randrange(5)):
        parts.append((parts[-1] if parts else 0.0) + draw.random())
    error = draw.choice([None, None, None, "timeout", "status 429"])
    at = draw.random() * 10
    return Outcome(at, tuple(parts), (parts[-1] if parts else 0.0) + draw.random(), draw.randrange(1, 90), error)


@pytest.mark.parametrize("seed", range(20))
def test_a_row_equals_a_naive_computation_and_excludes_failed_requests(seed: int) -> None:
    draw = random.Random(seed)
    rounds = [[drawn_outcome(draw) for _ in range(draw.randint(4, 30))] for _ in range(3)]
    row = row_of("3x", 2.0, rounds, rounds)
    good, errors, first, between, whole = [], Counter[str](), [], [], []
    per_second = []
    for outcomes in rounds:
        tokens, ends = 0, []
        for outcome in outcomes:
            if outcome.error is not None:
                errors[outcome.error] += 1
                continue
            good.append(outcome)
            tokens += outcome.tokens
            ends.append(outcome.at + outcome.seconds)
            whole.append(outcome.seconds)
            for n, part in enumerate(outcome.parts):
                (between if n else first).append(part - outcome.parts[n - 1] if n else part)
        per_second.append(tokens / (max(ends) - min(o.at for o in outcomes)) if ends else 0.0)
    assert (row.requests, row.errors) == (len(good), errors)
    assert row.tokens == sum(outcome.tokens for outcome in good)
    assert row.tokens_per_second == pytest.approx(sorted(per_second)[1])
    for found, values in ((row.first_token, first), (row.between_tokens, between), (row.whole, whole)):
        expected = np.percentile(values, [50, 95, 99])
        assert [found.p50, found.p95, found.p99] == pytest.approx(expected, abs=1e-8)
    assert row.over_first is None or row.over_first.median == pytest.approx(1.0)


def test_a_row_without_answers_has_no_figures() -> None:
    failed = [Outcome(0.0, (), 1.0, 0, "timeout")] * 3
    row = row_of("3x", 2.0, [failed], [failed])
    assert (row.requests, row.errors, row.tokens_per_second, row.over_first) == (0, {"timeout": 3}, 0.0, None)
    assert row.whole == Percentiles(None, None, None)
    assert throughput(failed) == (0.0, 0.0, 0.0)


class Slow(BaseHTTPRequestHandler):
    """Answers as the prompt says: with text, or a failure."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._whole(200, {"data": [{"id": "the first"}, {"id": "another"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        SEEN.append({**asked, "key": self.headers.get("Authorization")})
        prompt = asked["prompt"]
        if "busy" in prompt:
            self._whole(429, {"error": {"message": "busy"}})
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        if "speedup" in asked:  # it reaches at most 4.87
            self.send_header("X-Skipdecode-Planned-Speedup", f"{min(asked['speedup'], 4.87):.2f}")
        self.end_headers()
        if "rubbish" in prompt:
            self._say("data: {\n\n")
            return
        # The requested speed scales the delays.
        speed = asked.get("speedup", 1.0)
        for n in range(TOKENS):
            time.sleep((BETWEEN if n else FIRST) / speed)
            self._event("a")
            if "broken" in prompt:
                return
            if "failed" in prompt:
                self._say('data: {"error": {"message": "of its own"}}\n\n')
                return
        self._event("", "stop")
        self._say(f'data: {{"choices": [], "usage": {{"completion_tokens": {TOKENS + 1}}}}}\n\ndata: [DONE]\n\n')

    def _event(self, text: str, end: str | None = None) -> None:
        self._say(f"data: {json.dumps({'choices': [{'text': text, 'finish_reason': end}]})}\n\n")

    def _say(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def _whole(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture(scope="module")
def slow_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever)
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        server.server_close()


def asked_of(url: str, prompts: Sequence[str], arrivals: Sequence[float], timeout: float = 30.0) -> list[Outcome]:
    return asyncio.run(play(Endpoint(url, {"max_tokens": 9}), prompts, arrivals, timeout, lambda: None))


def test_measured_latencies_equal_known_delays(slow_url: str) -> None:
    arrivals = [0.0, 0.05, 0.3]
    start = time.perf_counter()
    outcomes = asked_of(slow_url, ["text"] * 3, arrivals)
    assert time.perf_counter() - start < 2 * 0.75  # requests don't wait for each other
    for outcome, arrival in zip(outcomes, arrivals, strict=True):
        assert outcome.error is None
        assert outcome.tokens == TOKENS + 1  # as the server counts them
        assert outcome.at == pytest.approx(arrival, abs=0.05)
        assert outcome.parts == pytest.approx([FIRST + n * BETWEEN for n in range(TOKENS)], abs=0.05)
        assert outcome.seconds == pytest.approx(FIRST + (TOKENS - 1) * BETWEEN, abs=0.05)
        read = Outcome.from_list(json.loads(json.dumps(outcome.to_list())))
        assert read.parts == pytest.approx(outcome.parts, abs=1e-6)


def test_failures_are_named_and_do_not_affect_other_requests(slow_url: str) -> None:
    prompts = ["busy", "rubbish", "broken", "failed", "text"]
    found = asked_of(slow_url, prompts, [0.0] * 5)
    named = ["status 429", "not an answer of OpenAI's API", "incomplete answer", "error event in the stream", None]
    assert [outcome.error for outcome in found] == named
    assert asked_of(slow_url, ["text"], [0.0], timeout=0.1)[0].error == "timeout"
    assert asked_of("http://127.0.0.1:9/v1", ["text"], [0.0])[0].error == "ClientConnectorError"


def arguments(url: str, output: Path, **changes: str) -> list[str]:
    options = {"--url": url, "--task": "departures", "--requests": "5", "--rounds": "2", "--rate": "50 inf", **changes}
    return ["--output", str(output), *(word for name, value in options.items() for word in [name, *value.split()])]


def test_a_running_server_is_tested_at_several_speeds_and_the_report_compares_them(
    slow_url: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    SEEN.clear()
    titles: list[str] = []

    def noted(path: Path, figure: Any) -> None:
        titles.append(figure.axes[0].get_title(loc="left"))
        save_png(path, figure)

    monkeypatch.setattr(eval.load.report, "save_png", noted)
    output = tmp_path / "load.json"
    assert main(arguments(slow_url, output, **{"--system": "1x 3x"})) == 0
    assert titles == [f"{slow_url}: latency against throughput"]
    assert {seen["model"] for seen in SEEN} == {"the first"}
    assert {seen["key"] for seen in SEEN} == {"Bearer a key"}
    assert Counter(seen["speedup"] for seen in SEEN) == {1.0: 28, 3.0: 28}  # 8 to warm up, 2 rounds of 2 rates
    report = json.loads(output.read_text())
    rows = [(row["system"], row["rate"]) for row in report["rows"]]
    assert rows == [("1x", 50), ("3x", 50), ("1x", None), ("3x", None)]
    for row in report["rows"]:
        speed = float(row["system"][0])
        assert (row["requests"], row["errors"], row["tokens"]) == (10, {}, 10 * (TOKENS + 1))
        assert row["first_token"]["p50"] == pytest.approx(FIRST / speed, abs=0.04)
        assert row["between_tokens"]["p50"] == pytest.approx(BETWEEN / speed, abs=0.03)
        assert row["whole"]["p50"] == pytest.approx((FIRST + (TOKENS - 1) * BETWEEN) / speed, abs=0.06)
    at_once = report["rows"][3]
    assert at_once["over_first"]["median"] == pytest.approx(3.0, rel=0.5)
    assert at_once["requests_per_second"] == pytest.approx(5 / (0.33 / 3), rel=0.5)
    markdown = output.with_suffix(".md").read_text()
    assert "| 3x | all at once |" in markdown
    assert "errors" not in markdown
    assert output.with_suffix(".png").stat().st_size > 10_000
    assert "| time to first token (ms) |" in markdown
    assert "picture: " in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["load.json", "load.md", "load.png"]
    assert main(arguments(slow_url, output)) == 2
    assert "already exists" in capsys.readouterr().err


def test_an_unreachable_speed_is_marked_in_the_report_and_refused_with_strict(
    slow_url: str, tmp_path: Path, capsys: Any
) -> None:
    words = {"--system": "1.5x 9x", "--rate": "inf", "--rounds": "1", "--requests": "2"}
    output = tmp_path / "load.json"
    assert main([*arguments(slow_url, output, **words), "--strict"]) == 2
    said = "--system is 9x: the server can't reach this speed and plans 4.87x; use a lower speed, or"
    assert said in capsys.readouterr().err
    assert not output.exists()
    assert main(arguments(slow_url, output, **words)) == 0
    assert [row["planned"] for row in json.loads(output.read_text())["rows"]] == [None, 4.87]
    markdown = output.with_suffix(".md").read_text()
    assert "| 9x (planned 4.87x) |" in markdown
    assert "The server can't reach some speeds, and used the fastest schedule" in markdown


def test_rates_that_differ_in_late_digits_are_all_tested(
    slow_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[float] = []

    def fake(asked: Endpoint, prompts: list[str], arrivals: list[float], *_: Any) -> list[Outcome]:
        played.append(arrivals[-1])
        return [Outcome(at, (0.1,), 0.2, 3) for at in arrivals]

    monkeypatch.setattr(eval.load.run, "_play", fake)
    words = {"--rate": "1234.567 1234.568", "--rounds": "1"}
    assert main(arguments(slow_url, tmp_path / "load.json", **words)) == 0
    expected = [poisson_arrivals(rate, 5, 0)[-1] for rate in (1234.567, 1234.568)]
    assert played[1:] == expected  # the first is the warm-up


@pytest.mark.parametrize("cut_off_at", [1, 6])
def test_an_interrupted_load_test_continues_and_repeats_no_turn(
    slow_url: str, tmp_path: Path, cut_off_at: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    played: list[tuple[str, ...]] = []
    cut_off = False

    def fake(asked: Endpoint, prompts: list[str], arrivals: list[float], *_: Any) -> list[Outcome]:
        nonlocal cut_off
        if len(arrivals) == 5:
            if len(played) == cut_off_at and not cut_off:
                cut_off = True
                raise KeyboardInterrupt
            played.append((str(asked.body.get("speedup")), *map(str, arrivals), *prompts))
        return [Outcome(at, (0.1,), 0.2, 3) for at in arrivals]

    monkeypatch.setattr(eval.load.run, "_play", fake)
    output = tmp_path / "load.json"
    words = arguments(slow_url, output, **{"--system": "1x 3x"})
    assert main(words) == 130
    assert "interrupted: run the same command again to continue" in capsys.readouterr().err
    assert main([*words, "--seed", "7"]) == 2
    assert "load.journal.jsonl belongs to another benchmark (seed was 0, is 7)" in capsys.readouterr().err
    task = load_task("departures")
    other = SimpleNamespace(max_new_tokens=task.max_new_tokens, stream=lambda split: reversed(task.load(split)))
    with monkeypatch.context() as patched:
        patched.setattr(eval.load.run, "load_task", lambda *_, **__: other)
        assert main(words) == 2
    assert "load.journal.jsonl belongs to another benchmark (prompts was " in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(torch, "get_num_threads", lambda: 99)
        assert main(words) == 2
    assert "load.journal.jsonl belongs to another benchmark (machine.threads was " in capsys.readouterr().err
    assert main(words) == 0
    assert len(played) == 8
    # Both systems got the same requests at the same times, which differ between rounds, and each was first once.
    by_speed = [[turn[1:] for turn in played if turn[0] == speed] for speed in ("1.0", "3.0")]
    assert sorted(by_speed[0]) == sorted(by_speed[1])
    assert len(set(by_speed[0])) == 4
    assert [turn[0] for turn in played] == ["1.0", "3.0", "1.0", "3.0", "3.0", "1.0", "3.0", "1.0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["load.json", "load.md", "load.png"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--rate": "0"}, "--rate is [0.0]: rates must be above 0 requests per second"),
        ({"--rate": "nan"}, "--rate is [nan]"),
        ({"--rate": "2 2"}, "--rate is [2.0, 2.0]: name each once"),
        ({"--requests": "0"}, "--requests is 0: it must lie between 1 and"),
        ({"--timeout": "inf"}, "--timeout is inf"),
        ({"--system": "fast"}, "--system is 'fast': name a speed such as 3x, or one of served, lossless"),
        ({"--system": "0.5x"}, "--system is '0.5x'"),
        ({"--system": "lock-step-3x"}, "--system is 'lock-step-3x'"),
        ({"--system": "transformers"}, "--system is 'transformers'"),
        ({"--weights": "int8"}, "--weights is for a server that is started here"),
        ({"--wave-rows": "4"}, "--wave-rows is for a server that is started here"),
        ({"--url": "http://127.0.0.1:9/v1"}, "no server with OpenAI's API answers there"),
        ({"--task": "departure"}, "unknown task 'departure': did you mean 'departures'?"),
        ({"--task-option": "test_size=few"}, "test_size is 'few'"),
        ({"--output": "load.txt"}, "name a .json file"),
    ],
)
def test_invalid_input_prints_a_one_line_error_and_writes_nothing(
    slow_url: str, tmp_path: Path, changes: dict[str, str], message: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments(slow_url, Path("load.json"), **changes)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_answers_are_requested_as_streams_unless_an_option_or_its_old_name_says_otherwise(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[Any] = []
    monkeypatch.setattr(eval.load.run, "benchmark", requests.append)
    for words in ([], ["--no-stream"], ["--whole"]):
        assert main([*arguments("http://127.0.0.1:9/v1", tmp_path / "load.json"), *words]) == 0
    assert [request.stream for request in requests] == [True, False, False]
    assert capsys.readouterr().err == "warning: --whole is deprecated: use --no-stream\n"


def test_an_api_key_with_invalid_characters_is_refused_without_printing_it(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very\x01secret")
    words = ["--url", "http://127.0.0.1:9/v1", "--task", "departures", "--rate", "5"]
    assert main([*words, "--output", str(tmp_path / "load.json")]) == 2
    said = capsys.readouterr().err
    assert "OPENAI_API_KEY contains characters that are not allowed in a key" in said
    assert "secret" not in said


def test_static_batching_decodes_on_the_default_device_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # without profiles of other tests
    elsewhere, found = torch.device("meta"), []  # in place of a GPU
    folder = save_checkpoint(tmp_path / "run", 2)
    monkeypatch.setattr(sys, "argv", ["static_batching", str(folder), "--port", "1"])
    monkeypatch.setattr(static_batching, "resolve_device", lambda name: elsewhere)
    monkeypatch.setattr(static_batching, "make_app", lambda *made: found.extend(made))
    monkeypatch.setattr(static_batching.uvicorn, "run", lambda *_, **__: None)
    assert static_batching.main() == 0
    model, tokenizer, *_ = found
    assert model.device == elsewhere
    given: list[torch.device] = []

    def generate(**asked: Any) -> torch.Tensor:
        given.append(asked["input_ids"].device)
        return torch.zeros(1, 99, dtype=torch.long)

    monkeypatch.setattr(model, "generate", generate)
    static_batching.decode(model, tokenizer, [static_batching.CompletionRequest(prompt="a")], "model")
    assert given == [elsewhere]


@pytest.mark.parametrize("others", [["lock-step-1x"], pytest.param(["lock-step-1x", "transformers"], marks=SLOW)])
def test_a_checkpoint_is_load_tested_with_static_batching_and_transformers_as_baselines(
    others: list[str], tmp_path: Path, capsys: Any
) -> None:
    folder = save_checkpoint(tmp_path / "tiny", 6)
    output = tmp_path / "load.json"
    words = ["--checkpoint", str(folder), "--output", str(output), "--system", "1x", *others]
    threads = threading.active_count()
    assert main([*words, "--rate", "inf", "--requests", "6", "--rounds", "1", "--max-new-tokens", "5"]) == 0
    report = json.loads(output.read_text())
    rows = report["rows"]
    assert (report["most_rows"], report["streamed"], report["task"]) == (32, True, "departures")
    assert [row["system"] for row in rows] == ["1x", "lock-step-1x", "transformers serve"][: 1 + len(others)]
    assert [(row["requests"], row["errors"]) for row in rows] == [(6, {})] * len(rows)
    assert len({row["tokens"] for row in rows}) == 1  # all are the output of full depth
    assert rows[0]["first_token"]["p50"] < rows[0]["whole"]["p50"]
    assert threading.active_count() == threads
    words = ["--task", "departures", "--output", str(tmp_path / "other.json"), "--checkpoint"]
    assert main([*words, str(tmp_path / "none")]) == 2
    assert "none is neither a folder" in capsys.readouterr().err
    if "transformers" not in others:
        return  # only before a release: a failing server takes as long to start as a working one
    (folder / "model.safetensors").unlink()
    assert main([*words, str(folder)]) == 2
    assert "the skipdecode server doesn't start: error: " in capsys.readouterr().err
