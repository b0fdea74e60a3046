"""What is under load: servers that are started for it, each a process of its own, and one that runs."""

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

from eval.load.client import Asked
from eval.load.request import LOCK_STEP, STANDALONE, TRANSFORMERS, LoadRequest, speed_of
from skipdecode import ConfigError
from skipdecode.cli.process import ended_by_sigterm

API_KEY = "OPENAI_API_KEY"
_OWN, _RUNNING = "skipdecode", "running"
_STARTING = 300.0  # seconds that a server may take to load its model
_ENDING = 20.0  # and to end when it is told to


@contextmanager
def served(request: LoadRequest, max_new_tokens: int) -> Iterator[dict[str, Asked]]:
    """Each system's address and what it is sent, by its name. Servers that are started end with the context.

    The systems that one server answers for share it. Raises ConfigError for a server that doesn't start or answer.
    """
    with ExitStack() as stack:
        stack.enter_context(ended_by_sigterm())
        servers: dict[str, tuple[str, str]] = {}  # by kind: address and name of the model
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
            body = {"model": model, "max_tokens": max_new_tokens, "temperature": 0, **_own(name)}
            if not request.whole:
                body["stream_options"] = {"include_usage": True}
            found[name] = Asked(url, body, not request.whole, headers)
        yield found


def _kind(name: str) -> str:
    """The server that answers for a system."""
    if name in (TRANSFORMERS, STANDALONE):
        return name
    return LOCK_STEP if name.startswith(LOCK_STEP) else _OWN


def _own(name: str) -> dict[str, Any]:
    """What a system's requests ask for beside a text."""
    if name == "lossless":
        return {"lossless": True}
    speed = speed_of(name)
    return {"speedup": speed} if speed is not None else {}


@contextmanager
def _started(kind: str, request: LoadRequest, max_new_tokens: int) -> Iterator[tuple[str, str]]:
    """The address of a server and the name of its model, once it answers."""
    folder = request.standalone if kind == STANDALONE else request.checkpoint
    assert folder is not None
    port = str(_free_port())
    rows, name = ["--rows", str(request.rows)], folder
    if kind == _OWN:
        name = "served"
        command = ["skipdecode", "serve", folder, "--name", name, "--queue", "1000000", "--timeout", "86400", *rows]
        command += ["--max-new-tokens", str(max_new_tokens), "--most-new-tokens", str(max_new_tokens)]
        command += ["--wave-rows", str(request.wave_rows), "--wave-seconds", str(request.wave_seconds)]
    elif kind == LOCK_STEP:
        command = ["eval.load.lock_step", folder, *rows]
    else:
        command = ["transformers.cli.transformers", "serve", folder, "--continuous-batching", "--log-level", "error"]
        # By itself it takes most of the memory for its cache, which the others have to live beside.
        command += ["--cb-block-size", "32", "--cb-num-blocks", str(16 * request.rows), "--cb-max-batch-tokens", "512"]
    if kind in (_OWN, LOCK_STEP) and request.weights is not None:
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
                process.wait(_ENDING)
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait_until_healthy(process: "subprocess.Popen[bytes]", base: str, kind: str, log: Any) -> None:
    until = time.monotonic() + _STARTING
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy doesn't know this machine's ports
    while process.poll() is None and time.monotonic() < until:
        try:
            with opener.open(f"{base}/health", timeout=5):
                return
        except (OSError, ValueError):
            time.sleep(0.1)
    log.seek(0)
    said = [line for line in log.read().splitlines() if line.strip()][-1:]
    raise ConfigError(f"the {kind.strip('-')} server doesn't start: {said[0] if said else 'it says nothing'}")


def _headers() -> dict[str, str]:
    key = os.environ.get(API_KEY, "").strip()
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"{API_KEY} holds signs that no key has")  # and isn't shown
    return {"Authorization": f"Bearer {key}"} if key else {}


def _first_model(url: str, headers: Mapping[str, str]) -> str:
    """The model that a server names first. Raises ConfigError where none answers."""
    try:
        asked = urllib.request.Request(f"{url}/models", headers=dict(headers))
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        advice = f"; a key is read from {API_KEY}" if error.code in (401, 403) else ""
        raise ConfigError(f"--url {url}: {url}/models answers with status {error.code}{advice}") from error
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"--url {url}: no server of OpenAI's interface answers there: {reason}") from error
