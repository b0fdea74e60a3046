"""`skipdecode serve --replicas` with Ray Serve, of which one replica is killed.

pytest tests/release/test_replicas.py, in an environment with skipdecode[ray]
"""

import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from server_processes import announced_address
from small_checkpoints import save_checkpoint

pytest.importorskip("ray", reason="replicas need skipdecode[ray]")
pytestmark = pytest.mark.timeout(1200)  # each of Ray's processes imports torch, on as many cores as there are
WAIT = 330  # seconds, more than the server's --timeout: whoever waits longer gets neither an answer nor an error
BODY = {"model": "tiny", "prompt": "vehicle: ferry\n", "max_tokens": 100, "logit_bias": {"2": -100}}  # no end token


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A server with two replicas of one thread, and its address."""
    folder = save_checkpoint(tmp_path_factory.mktemp("served") / "tiny", 6)
    options = ["--replicas", "2", "--threads", "1", "--port", "0", "--speedup", "2"]
    command = [sys.executable, "-m", "skipdecode", "serve", str(folder), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process, announced_address(process)
    finally:
        process.terminate()
        process.wait(60)  # Ray's processes end with it


def replicas(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if child.name().startswith("ray::ServeReplica")]


def send(address: str, number: int = 0, **fields: int) -> str:
    """The outcome of a request, streamed for even numbers."""
    stream = number % 2 == 0
    try:
        answer = httpx.post(f"{address}/v1/completions", json={**BODY, "stream": stream, **fields}, timeout=WAIT)
    except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError) as error:
        return "broken stream" if stream and isinstance(error, httpx.RemoteProtocolError) else "no connection"
    if answer.status_code != 200:
        return f"status {answer.status_code}"
    ended = answer.text.endswith("data: [DONE]\n\n") if stream else answer.json()["choices"][0]["text"]
    return "answer" if ended else "cut off without an error"


def test_requests_get_an_answer_or_an_error_when_a_replica_is_killed_and_another_takes_its_place(
    server: tuple["subprocess.Popen[str]", str],
) -> None:
    process, address = server
    killed, _ = replicas(process)
    assert send(address) == "answer"
    with ThreadPoolExecutor(40) as pool:
        sent = [pool.submit(send, address, number) for number in range(80)]
        while sum(each.done() for each in sent) < 10:
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        outcomes = Counter(each.result() for each in sent)
    assert outcomes.keys() <= {"answer", "status 500", "status 503", "status 504", "broken stream", "no connection"}
    assert outcomes["answer"] > 40, "the other replica goes on"
    assert outcomes["answer"] < 80, "no request ran in the killed replica"

    deadline = time.monotonic() + 300
    while len(replicas(process)) < 2 or "ok" not in _healthy(address, 8):
        assert time.monotonic() < deadline, "no replica took its place"
        time.sleep(0.5)
    assert {send(address, number) for number in range(8)} == {"answer"}
    page = httpx.get(f"{address}/metrics", timeout=WAIT).text
    assert len(set(re.findall(r'skipdecode_tokens_total{replica="(\w+)"}', page))) == 2


def _healthy(address: str, times: int) -> str:
    answers = {httpx.get(f"{address}/health", timeout=WAIT).text for _ in range(times)}
    return answers.pop() if len(answers) == 1 else "differs"


def test_after_sigterm_replicas_finish_running_requests_and_refuse_new_ones(
    server: tuple["subprocess.Popen[str]", str],
) -> None:
    process, address = server
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(send, address, number, n=16, temperature=1) for number in range(4)]
        while _sequences(address) < 4 * 16:
            assert not any(each.done() for each in running), "they ended before they had all begun"
        process.send_signal(signal.SIGTERM)
        new: Counter[str] = Counter()
        while process.poll() is None:
            new[send(address, 1)] += 1
        assert [each.result() for each in running] == ["answer"] * 4
    assert new.keys() <= {"answer", "status 503", "no connection"}
    assert new["status 503"]
    assert process.wait() == 0


def _sequences(address: str) -> float:
    page = httpx.get(f"{address}/metrics", timeout=WAIT).text
    return sum(map(float, re.findall(r"^skipdecode_(?:running|waiting)\S* (.+)$", page, re.MULTILINE)))
