"""The benchmark under load: arrivals, figures against known delays, and the command as a user runs it."""

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

FIRST, BETWEEN, TOKENS = 0.15, 0.06, 4  # seconds, and parts of a text
SLOW = pytest.mark.release  # `transformers serve` takes its time to start
SEEN: list[dict[str, Any]] = []  # what the server was asked


# ---- arrivals


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_arrivals_are_a_poisson_process(rate: float) -> None:
    arrivals = poisson_arrivals(rate, 20_000, seed=3)
    gaps = [b - a for a, b in pairwise(arrivals)]
    assert arrivals[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(1 / rate, rel=0.03)
    # Exponential: a share of exp(-x) of the gaps is longer than x times their mean, and one knows nothing of the next.
    for times in (0.1, 0.5, 1.0, 2.0, 4.0):
        assert sum(gap > times / rate for gap in gaps) / len(gaps) == pytest.approx(math.exp(-times), abs=0.012)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03
    counts = Counter(int(arrival * rate / 10) for arrival in arrivals)  # of ten mean gaps each
    spread = statistics.variance([counts[n] for n in range(1900)])
    assert spread == pytest.approx(10, rel=0.15)  # the variance of a Poisson count is its mean


def test_a_seed_gives_the_same_requests_again_and_another_one_others() -> None:
    prompts = [str(n) for n in range(7)]
    assert poisson_arrivals(2.0, 50, seed=1) == poisson_arrivals(2.0, 50, seed=1) != poisson_arrivals(2.0, 50, seed=2)
    assert poisson_arrivals(math.inf, 3, seed=1) == [0.0, 0.0, 0.0]
    found = drawn_prompts(prompts, 20, seed=1)
    assert found == drawn_prompts(prompts, 20, seed=1) != drawn_prompts(prompts, 20, seed=2)
    assert sorted(found[:7]) == sorted(found[7:14]) == prompts
    assert found[:7] != found[7:14]
    # A rate changes how fast they come, and nothing else.
    slow, fast = poisson_arrivals(1.0, 50, seed=5), poisson_arrivals(10.0, 50, seed=5)
    assert slow == pytest.approx([10 * arrival for arrival in fast])


# ---- figures


def drawn_outcome(draw: random.Random) -> Outcome:
    parts: list[float] = []
    for _ in range(draw.randrange(5)):
        parts.append((parts[-1] if parts else 0.0) + draw.random())
    error = draw.choice([None, None, None, "timeout", "status 429"])
    at = draw.random() * 10
    return Outcome(at, tuple(parts), (parts[-1] if parts else 0.0) + draw.random(), draw.randrange(1, 90), error)


@pytest.mark.parametrize("seed", range(20))
def test_a_row_is_what_a_loop_finds_and_failed_requests_are_counted_alone(seed: int) -> None:
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


def test_where_nothing_was_answered_there_is_no_figure() -> None:
    failed = [Outcome(0.0, (), 1.0, 0, "timeout")] * 3
    row = row_of("3x", 2.0, [failed], [failed])
    assert (row.requests, row.errors, row.tokens_per_second, row.over_first) == (0, {"timeout": 3}, 0.0, None)
    assert row.whole == Percentiles(None, None, None)
    assert throughput(failed) == (0.0, 0.0, 0.0)


# ---- a client, of a server with known delays


class Slow(BaseHTTPRequestHandler):
    """Answers as its prompt says: text, or what goes wrong."""

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
        if "speedup" in asked:  # of which it can reach 4.87 at most
            self.send_header("X-Skipdecode-Planned-Speedup", f"{min(asked['speedup'], 4.87):.2f}")
        self.end_headers()
        if "rubbish" in prompt:
            self._say("data: {\n\n")
            return
        # A speed that is asked for is that of the delays.
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


def test_known_delays_are_what_is_measured(slow_url: str) -> None:
    arrivals = [0.0, 0.05, 0.3]
    start = time.perf_counter()
    outcomes = asked_of(slow_url, ["text"] * 3, arrivals)
    assert time.perf_counter() - start < 2 * 0.75  # nobody waits for another one's answer
    for outcome, arrival in zip(outcomes, arrivals, strict=True):
        assert outcome.error is None
        assert outcome.tokens == TOKENS + 1  # as the server counts them
        assert outcome.at == pytest.approx(arrival, abs=0.05)
        assert outcome.parts == pytest.approx([FIRST + n * BETWEEN for n in range(TOKENS)], abs=0.05)
        assert outcome.seconds == pytest.approx(FIRST + (TOKENS - 1) * BETWEEN, abs=0.05)
        read = Outcome.from_list(json.loads(json.dumps(outcome.to_list())))
        assert read.parts == pytest.approx(outcome.parts, abs=1e-6)


def test_what_goes_wrong_is_named_and_hinders_nobody(slow_url: str) -> None:
    prompts = ["busy", "rubbish", "broken", "failed", "text"]
    found = asked_of(slow_url, prompts, [0.0] * 5)
    named = ["status 429", "no answer of OpenAI's form", "the answer broke off", "an error in the stream", None]
    assert [outcome.error for outcome in found] == named
    assert asked_of(slow_url, ["text"], [0.0], timeout=0.1)[0].error == "timeout"
    assert asked_of("http://127.0.0.1:9/v1", ["text"], [0.0])[0].error == "ClientConnectorError"


# ---- the command


def arguments(url: str, output: Path, **changes: str) -> list[str]:
    options = {"--url": url, "--task": "departures", "--requests": "5", "--rounds": "2", "--rate": "50 inf", **changes}
    return ["--output", str(output), *(word for name, value in options.items() for word in [name, *value.split()])]


def test_a_running_server_is_asked_for_speeds_and_the_report_says_how_they_compare(
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
    assert titles == [f"{slow_url}: the wait at each throughput"]
    assert {seen["model"] for seen in SEEN} == {"the first"}
    assert {seen["key"] for seen in SEEN} == {"Bearer a key"}
    assert Counter(seen["speedup"] for seen in SEEN) == {1.0: 28, 3.0: 28}  # 8 to warm up, 2 rounds of 2 rates
    report = json.loads(output.read_text())
    assert [(row["system"], row["rate"]) for row in report["rows"]] == [
        (system, rate) for rate in (50, None) for system in ("1x", "3x")
    ]
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
    assert "over the first" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["load.json", "load.md", "load.png"]
    assert main(arguments(slow_url, output)) == 2
    assert "is there already" in capsys.readouterr().err


def test_a_speed_that_a_server_cannot_reach_is_marked_and_refused_if_that_is_asked_for(
    slow_url: str, tmp_path: Path, capsys: Any
) -> None:
    words = {"--system": "1.5x 9x", "--rate": "inf", "--rounds": "1", "--requests": "2"}
    output = tmp_path / "load.json"
    assert main([*arguments(slow_url, output, **words), "--strict"]) == 2
    assert "--system is 9x: the server can't reach it and plans 4.87x; ask for less, or" in capsys.readouterr().err
    assert not output.exists()
    assert main(arguments(slow_url, output, **words)) == 0
    assert [row["planned"] for row in json.loads(output.read_text())["rows"]] == [None, 4.87]
    markdown = output.with_suffix(".md").read_text()
    assert "| 9x (planned 4.87x) |" in markdown
    assert "Speeds that the server can't reach, in place of which the fastest schedule" in markdown


def test_rates_of_many_digits_are_played_each(slow_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[float] = []

    def fake(asked: Endpoint, prompts: list[str], arrivals: list[float], *_: Any) -> list[Outcome]:
        played.append(arrivals[-1])
        return [Outcome(at, (0.1,), 0.2, 3) for at in arrivals]

    monkeypatch.setattr(eval.load.run, "_play", fake)
    words = {"--rate": "1234.567 1234.568", "--rounds": "1"}
    assert main(arguments(slow_url, tmp_path / "load.json", **words)) == 0
    expected = [poisson_arrivals(rate, 5, 0)[-1] for rate in (1234.567, 1234.568)]
    assert played[1:] == expected  # the first warms up


@pytest.mark.parametrize("cut_off_at", [1, 6])
def test_one_that_is_cut_off_goes_on_and_plays_no_turn_twice(
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
    assert "interrupted: the same command goes on" in capsys.readouterr().err
    assert main([*words, "--seed", "7"]) == 2
    assert "load.journal.jsonl is of another benchmark (seed was 0, is 7)" in capsys.readouterr().err
    task = load_task("departures")
    other = SimpleNamespace(max_new_tokens=task.max_new_tokens, stream=lambda split: reversed(task.load(split)))
    with monkeypatch.context() as patched:
        patched.setattr(eval.load.run, "load_task", lambda *_, **__: other)
        assert main(words) == 2
    assert "load.journal.jsonl is of another benchmark (prompts was " in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(torch, "get_num_threads", lambda: 99)
        assert main(words) == 2
    assert "load.journal.jsonl is of another benchmark (machine.threads was " in capsys.readouterr().err
    assert main(words) == 0
    assert len(played) == 8
    # Both systems got the same requests at the same times, each round others, and each came first in one.
    by_speed = [[turn[1:] for turn in played if turn[0] == speed] for speed in ("1.0", "3.0")]
    assert sorted(by_speed[0]) == sorted(by_speed[1])
    assert len(set(by_speed[0])) == 4
    assert [turn[0] for turn in played] == ["1.0", "3.0", "1.0", "3.0", "3.0", "1.0", "3.0", "1.0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["load.json", "load.md", "load.png"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--rate": "0"}, "--rate is [0.0]: name requests a second above 0"),
        ({"--rate": "nan"}, "--rate is [nan]"),
        ({"--rate": "2 2"}, "--rate is [2.0, 2.0]: name each once"),
        ({"--requests": "0"}, "--requests is 0: it must lie between 1 and"),
        ({"--timeout": "inf"}, "--timeout is inf"),
        ({"--system": "fast"}, "--system is 'fast': name a speed such as 3x, or one of served, lossless"),
        ({"--system": "0.5x"}, "--system is '0.5x'"),
        ({"--system": "lock-step-3x"}, "--system is 'lock-step-3x'"),
        ({"--system": "transformers"}, "--system is 'transformers'"),
        ({"--weights": "int8"}, "--weights is of a server that is started here"),
        ({"--wave-rows": "4"}, "--wave-rows is of a server that is started here"),
        ({"--url": "http://127.0.0.1:9/v1"}, "no server of OpenAI's interface answers there"),
        ({"--task": "departure"}, "unknown task 'departure': did you mean 'departures'?"),
        ({"--task-option": "test_size=few"}, "test_size is 'few'"),
        ({"--output": "load.txt"}, "name a .json file"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    slow_url: str,
    tmp_path: Path,
    changes: dict[str, str],
    message: str,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments(slow_url, Path("load.json"), **changes)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_key_with_signs_that_none_has_is_refused_and_not_shown(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very\x01secret")
    words = ["--url", "http://127.0.0.1:9/v1", "--task", "departures", "--rate", "5"]
    assert main([*words, "--output", str(tmp_path / "load.json")]) == 2
    said = capsys.readouterr().err
    assert "OPENAI_API_KEY holds signs that no key has" in said
    assert "secret" not in said


def test_static_batching_batches_decode_on_the_device_of_the_server_beside_them(
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
    static_batching.decode(model, tokenizer, [static_batching.CompletionRequest(prompt="a")], None)
    assert given == [elsewhere]


@pytest.mark.parametrize("others", [["lock-step-1x"], pytest.param(["lock-step-1x", "transformers"], marks=SLOW)])
def test_a_checkpoint_is_served_beside_static_batching_batches_and_transformers(
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
    assert len({row["tokens"] for row in rows}) == 1  # all of them full depth's texts
    assert rows[0]["first_token"]["p50"] < rows[0]["whole"]["p50"]
    assert threading.active_count() == threads
    words = ["--task", "departures", "--output", str(tmp_path / "other.json"), "--checkpoint"]
    assert main([*words, str(tmp_path / "none")]) == 2
    assert "none is not a folder" in capsys.readouterr().err
    if "transformers" not in others:
        return  # before a release: a server that doesn't start takes as long as one that does
    (folder / "model.safetensors").unlink()
    assert main([*words, str(folder)]) == 2
    assert "the skipdecode server doesn't start: error: " in capsys.readouterr().err
