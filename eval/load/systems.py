"""The systems of a load test: servers started in their own processes, or a running server."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from typing import Any

from eval.load.client import Endpoint
from eval.load.request import STANDALONE, STATIC_BATCHING, TRANSFORMERS, LoadRequest, speed_of
from skipdecode import ConfigError
from skipdecode.cli.process import ended_by_sigterm

API_KEY = "OPENAI_API_KEY"
_OWN, _RUNNING = "skipdecode", "running"
_START_TIMEOUT = 300.0  # seconds for loading the model
_STOP_TIMEOUT = 20.0  # seconds for a graceful shutdown


@contextmanager
def served(request: LoadRequest, max_new_tokens: int) -> Iterator[dict[str, Endpoint]]:
    """The endpoint of each system by name. Servers started here stop when the context ends.

    Systems of the same kind share a server. Raises ConfigError for a server that doesn't start or answer.
    """
    with ExitStack() as stack:
        stack.enter_context(ended_by_sigterm())
        servers: dict[str, tuple[str, str]] = {}  # kind -> address and model name
        headers = {}
        if request.url is not None:
            url, headers = request.url.rstrip("/"), _headers()
            servers[_RUNNING] = url, request.model or _first_model(url, headers)
        found = {}
        for name in request.systems:
            kind = _RUNNING if request.url is not None else _kind(name)
            if kind not in servers:
                servers[kind] = stack.enter_context(_started(kind, request, max_new_tokens))
            url, model = servers[kind]
            body = {"model": model, "max_tokens": max_new_tokens, "temperature": 0, **_extra_fields(name)}
            if request.stream:
                body["stream_options"] = {"include_usage": True}
            found[name] = Endpoint(url, body, request.stream, headers)
        yield found


def _kind(name: str) -> str:
    if name in (TRANSFORMERS, STANDALONE):
        return name
    return STATIC_BATCHING if name.startswith(STATIC_BATCHING) else _OWN


def _extra_fields(name: str) -> dict[str, Any]:
    if name == "lossless":
        return {"lossless": True}
    speed = speed_of(name)
    return {"speedup": speed} if speed is not None else {}


@contextmanager
def _started(kind: str, request: LoadRequest, max_new_tokens: int) -> Iterator[tuple[str, str]]:
    """Start a server. Yields its address and model name once it answers."""
    folder = request.standalone if kind == STANDALONE else request.checkpoint
    assert folder is not None
    port = str(_free_port())
    rows, name = ["--rows", str(request.rows)], folder
    if kind == _OWN:
        name = "served"
        command = ["skipdecode", "serve", folder, "--name", name, "--queue", "1000000", "--timeout", "86400", *rows]
        command += ["--max-new-tokens", str(max_new_tokens), "--max-new-tokens-limit", str(max_new_tokens)]
        command += ["--wave-rows", str(request.wave_rows), "--wave-seconds", str(request.wave_seconds)]
    elif kind == STATIC_BATCHING:
        command = ["eval.load.static_batching", folder, *rows]
    else:
        command = ["transformers.cli.transformers", "serve", folder, "--continuous-batching", "--log-level", "error"]
        # By default its KV cache takes most of the memory, which the other servers need too.
        command += ["--cb-block-size", "32", "--cb-num-blocks", str(16 * request.rows), "--cb-max-batch-tokens", "512"]
    if kind in (_OWN, STATIC_BATCHING) and request.weights is not None:
        command += ["--weights", request.weights]
    if request.dtype is not None:
        command += ["--dtype", request.dtype]
    command = [sys.executable, "-m", *command, "--port", port]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            _wait_until_healthy(process, f"http://127.0.0.1:{port}", kind, log)
            yield f"http://127.0.0.1:{port}/v1", name
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT)
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait_until_healthy(process: "subprocess.Popen[bytes]", base: str, kind: str, log: Any) -> None:
    deadline = time.monotonic() + _START_TIMEOUT
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy can't reach local ports
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with opener.open(f"{base}/health", timeout=5):
                return
        except (OSError, ValueError):
            time.sleep(0.1)
    log.seek(0)
    last_line = [line for line in log.read().splitlines() if line.strip()][-1:]
    raise ConfigError(f"the {kind.strip('-')} server doesn't start: {last_line[0] if last_line else 'no output'}")


def _headers() -> dict[str, str]:
    key = os.environ.get(API_KEY, "").strip()
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"{API_KEY} contains characters that are not allowed in a key")  # without showing the key
    return {"Authorization": f"Bearer {key}"} if key else {}


def _first_model(url: str, headers: Mapping[str, str]) -> str:
    """The first model that a server lists. Raises ConfigError where no server answers."""
    try:
        request = urllib.request.Request(f"{url}/models", headers=dict(headers))
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        advice = f"; set the key in {API_KEY}" if error.code in (401, 403) else ""
        raise ConfigError(f"--url {url}: {url}/models returns status {error.code}{advice}") from error
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"--url {url}: no server with OpenAI's API answers there: {reason}") from error
