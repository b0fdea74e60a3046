"""If W&B can't be reached or rejects the key, a run is tracked offline, or refused if the recipe requires online."""

import http.server
import io
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import wandb
from rich.console import Console
from small_runs import SMALL

import train.cli
from train.recipe import TrackingSection
from train.weights_and_biases import LOGIN_SECONDS, choose_mode

KEY = "0123456789abcdef" * 3


@pytest.fixture(autouse=True)
def _a_process_that_knows_no_key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # no server listens there
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb.teardown()
    yield
    ending = threading.Thread(target=wandb.teardown, daemon=True)
    ending.start()
    ending.join(30)
    if ending.is_alive():  # W&B waits without a limit for its service, which was seen not to end
        for service in psutil.Process().children():
            if "wandb" in service.name():
                service.kill()
        ending.join()


class Refuses(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(401)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server that rejects every key."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    yield
    server.shutdown()
    server.server_close()


def chosen(**section: Any) -> tuple[str, str]:
    console = Console(file=io.StringIO(), width=40)
    mode = choose_mode(TrackingSection(**section), console)
    assert isinstance(console.file, io.StringIO)
    return mode, console.file.getvalue()


def test_without_a_network_a_run_is_tracked_offline_within_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert LOGIN_SECONDS < 10
    monkeypatch.setenv("WANDB_HTTP_TIMEOUT", "1")  # a user's own setting
    start = time.monotonic()
    mode, said = chosen(wandb="auto")
    assert time.monotonic() - start < 10
    assert mode == "offline"
    assert said.startswith("W&B can't be reached, or rejects the API key (")
    assert said.endswith("): the run is tracked offline; `wandb sync` uploads it later\n")
    assert said.count("\n") == 1


@pytest.mark.usefixtures("refusing")
def test_a_rejected_key_gives_a_warning_and_offline_tracking() -> None:
    mode, said = chosen(wandb="auto")
    assert mode == "offline"
    assert said.count("\n") == 1


def test_without_a_key_a_run_is_tracked_offline_without_a_warning() -> None:
    assert chosen(wandb="auto") == ("offline", "")
    assert chosen(wandb="off") == ("off", "")


@pytest.mark.parametrize("key", ["none", "malformed", "refused"])
def test_required_online_tracking_that_fails_is_refused_before_training(
    key: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if key == "refused":
        request.getfixturevalue("refusing")
    if key == "malformed":
        monkeypatch.setenv("WANDB_API_KEY", "nonsense")
    folder = tmp_path / "run"
    words = [*SMALL, "tracking.wandb=online", f"output.dir={folder}"]
    assert train.cli.main(["--recipe", "quickstart", *words]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: tracking.wandb is 'online': ")
    assert ("no API key is set" in said) == (key == "none")
    assert not folder.exists()
