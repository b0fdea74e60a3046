"""Without a network, cached repositories are loaded, and others are refused, without waiting for retries."""

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from small_checkpoints import in_hub_cache, save_checkpoint

import skipdecode
from skipdecode import ConfigError
from skipdecode.checkpoint.loading import load_tokenizer
from skipdecode.checkpoint.offline import _answers, without_network


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that accepts connections and never responds."""
    monkeypatch.setattr("skipdecode.checkpoint.offline._TIMEOUT", 0.5)
    monkeypatch.setattr("skipdecode.checkpoint.offline.is_offline_mode", lambda: False)
    _answers.cache_clear()  # another test's server may have had the same port
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield address


@pytest.mark.parametrize("status", [200, 404, 502])
def test_a_server_counts_as_reachable_unless_its_status_is_500_or_above(
    status: int, silent_hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Responder(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Responder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert _answers(f"http://127.0.0.1:{server.server_port}") is (status < 500)
        server.shutdown()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("address", ["hub.example", "http://[", "http://127.0.0.1:nine"])
def test_an_invalid_address_counts_as_unreachable(address: str) -> None:
    assert _answers(address) is False


def test_offline_a_repository_that_is_not_cached_is_refused_in_one_line_without_retries(
    silent_hub: str, tmp_path: Path
) -> None:
    began = time.monotonic()
    for load in (skipdecode.load, load_tokenizer):
        with pytest.raises(ConfigError, match=r"the Hub can't be reached \(http://127") as caught:
            load("me/absent", cache_dir=str(tmp_path))  # type: ignore[operator]
        assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 5


def test_offline_a_cached_repository_is_loaded_without_retries(silent_hub: str, tmp_path: Path) -> None:
    in_hub_cache(save_checkpoint(tmp_path / "tiny", 2), tmp_path, "me/tiny")
    began = time.monotonic()
    model, tokenizer = skipdecode.load("me/tiny", cache_dir=str(tmp_path))
    assert time.monotonic() - began < 10  # the first of the retries alone would take 31 s
    assert model.config.num_hidden_layers == 2
    assert tokenizer.eos_token == "</s>"


def test_loading_a_folder_does_not_contact_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("skipdecode.checkpoint.offline._answers", lambda address: pytest.fail("asked"))
    assert without_network(str(tmp_path)) == {}
