"""Runs the server process, from its start to its shutdown."""

import asyncio
import logging
import signal
import socket
import sys
from typing import Any

import torch
import uvicorn
from transformers.utils import logging as logging_of_transformers

from skipdecode.checkpoint.loading import load
from skipdecode.engine.engine import Engine
from skipdecode.errors import ConfigError
from skipdecode.generate.skip_generate import resolve_plan
from skipdecode.serve.app import LOG, make_app
from skipdecode.serve.settings import ServerOptions, ServeSettings

GRACE_SECONDS = 5  # for sending the last responses after all sequences have ended


def load_engine(options: ServerOptions, device: torch.device) -> tuple[Engine, Any]:
    """The engine for a checkpoint, and its tokenizer. Raises ConfigError for what can't be loaded or decoded."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    logging_of_transformers.disable_progress_bar()
    dtype = getattr(torch, options.dtype) if options.dtype else None
    model, tokenizer = load(options.checkpoint, dtype, gguf_file=options.gguf_file)  # never runs a checkpoint's code
    engine = Engine(
        model.to(device),  # type: ignore[arg-type]
        tokenizer,
        most_rows=options.rows,
        most_waiting=options.queue,
        cache_bytes=round(options.cache_gb * 1e9) if options.cache_gb is not None else None,
        wave_rows=options.wave_rows,
        wave_seconds=options.wave_seconds,
        wave_tokens=options.wave_tokens,
        prefix_mib=options.prefix_mib,
        weights=options.weights,
    )
    return engine, tokenizer


def run(engine: Engine, tokenizer: Any, settings: ServeSettings, host: str, port: int) -> int:
    """Serve until SIGTERM or Ctrl-C, then finish the requests that are running. Returns the exit status.

    Port 0 stands for any free one. Raises ConfigError if the server can't listen on this address, or the checkpoint
    can't reach the default speedup and the settings are strict.
    """
    how: Any = {"over": settings.over, "strict": settings.strict, "weights": engine.weights}
    plan = resolve_plan(engine.model, None, settings.speedup, **how)
    schedule = plan.schedule
    app = make_app(engine, tokenizer, settings)
    listening = listen(host, port)
    log_to_stderr()
    address = address_of(host, listening)
    LOG.info(
        f"serving {settings.name} at {settings.speedup:g}x (planned {plan.planned:.2f}x by {plan.predicted_by}: "
        f"{schedule.max_layers} to {schedule.min_layers} of {schedule.num_layers} layers per token) by default, "
        f"on {address}/v1; web page: {address}/"
    )
    warn_of_access(host, settings)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        h11_max_incomplete_event_size=2**16,
    )
    # uvicorn shuts down on these signals and raises them again afterwards. Then they are ignored: the exit status is 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    _Server(config, engine, settings.drain).run(sockets=[listening])
    LOG.info("stopped")
    return 0


class _Server(uvicorn.Server):
    """Answers new requests with status 503 while it finishes the running ones at a shutdown, for `drain` seconds.

    uvicorn by itself would refuse connections at once, which load balancers take for a broken server, and after its
    own time limit cancel the tasks that respond to requests.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, drain: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain = drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.ensure_future(asyncio.to_thread(self._engine.drain, self._drain))
        while not draining.done() and not self.force_exit:  # a second Ctrl-C
            await asyncio.wait({draining}, timeout=0.1)
        await asyncio.to_thread(self._engine.close)  # requests that haven't ended get an error
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on this address. Raises ConfigError if that can't be."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"can't listen on --host {host!r} --port {port}: {reason}") from error


def address_of(host: str, listening: socket.socket) -> str:
    """The URL of a socket that listens on a host."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"


def warn_of_access(host: str, settings: ServeSettings) -> None:
    """Warn of a server that others can use without a key."""
    if host not in ("127.0.0.1", "::1", "localhost") and settings.api_key is None:
        LOG.warning("anyone who can reach this address can use the server, as there is no --api-key")
    if "*" in settings.allow_origins and settings.api_key is None:
        LOG.warning("any web page in a browser that can reach this address can use it, as there is no --api-key")


def log_to_stderr() -> None:
    """Write the server's log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    LOG.handlers, LOG.propagate = [handler], False
    LOG.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").handlers = [handler]
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
