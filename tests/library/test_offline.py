"""Without a network: what is in the cache is used, and anything else is one line, soon."""

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from small_checkpoints import save_checkpoint

import skipdecode
from skipdecode import ConfigError
from skipdecode.checkpoint.loading import load_tokenizer
from skipdecode.checkpoint.offline import _answers, without_network


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address at which a connection is taken and nothing is ever said."""
    monkeypatch.setattr("skipdecode.checkpoint.offline._TIMEOUT", 0.5)
    monkeypatch.setattr("skipdecode.checkpoint.offline.is_offline_mode", lambda: False)
    _answers.cache_clear()  # a port may come back, of another test's server that answered
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield address


@pytest.mark.parametrize("status", [200, 404, 502])
def test_what_answers_is_asked_and_a_proxy_that_reaches_nobody_is_not(
    status: int, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert _answers(f"http://127.0.0.1:{server.server_port}") is (status < 500)
        server.shutdown()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("address", ["hub.example", "http://[", "http://127.0.0.1:nine"])
def test_what_is_no_address_answers_nothing(address: str) -> None:
    assert _answers(address) is False


def test_a_repository_that_is_not_in_the_cache_is_one_line_soon(nobody: str, tmp_path: Path) -> None:
    began = time.monotonic()
    for load in (skipdecode.load, load_tokenizer):
        with pytest.raises(ConfigError, match=r"the Hub can't be reached \(http://127") as caught:
            load("me/absent", cache_dir=str(tmp_path))  # type: ignore[operator]
        assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 5


def test_a_repository_that_is_in_the_cache_is_loaded_soon(nobody: str, tmp_path: Path) -> None:
    repository, commit = tmp_path / "models--me--tiny", "a" * 40
    save_checkpoint(repository / "snapshots" / commit, 2)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    began = time.monotonic()
    model, tokenizer = skipdecode.load("me/tiny", cache_dir=str(tmp_path))
    assert time.monotonic() - began < 10  # the first of the retries alone would take 31 s
    assert model.config.num_hidden_layers == 2
    assert tokenizer.eos_token == "</s>"


def test_a_folder_asks_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("skipdecode.checkpoint.offline._answers", lambda address: pytest.fail("asked"))
    assert without_network(str(tmp_path)) == {}
