"""Runs the server process, from its start to its shutdown."""

import asyncio
import logging
import math
import signal
import socket
import sys
from typing import Any

import uvicorn

from skipdecode.engine.engine import Engine
from skipdecode.errors import ConfigError
from skipdecode.generate.skip_generate import resolve_plan
from skipdecode.serve.app import LOG, make_app
from skipdecode.serve.settings import ServeSettings

_GRACE_SECONDS = 5  # for sending the last responses after all sequences have ended


def run(engine: Engine, tokenizer: Any, settings: ServeSettings, host: str, port: int) -> int:
    """Serve until SIGTERM or Ctrl-C, then finish the requests that were received before. Returns the exit status.

    Port 0 stands for any free one. Raises ConfigError if the server can't listen on this address, or the checkpoint
    can't reach the default speedup and the settings are strict.
    """
    how: Any = {"over": settings.over, "strict": settings.strict, "weights": engine.weights}
    plan = resolve_plan(engine.model, None, settings.speedup, **how)
    schedule = plan.schedule
    app = make_app(engine, tokenizer, settings)
    listening = _listen(host, port)
    _log_to_stderr()
    address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
    LOG.info(
        f"serving {settings.name} at {settings.speedup:g}x (planned {plan.planned:.2f}x by {plan.predicted_by}: "
        f"{schedule.max_layers} to {schedule.min_layers} of {schedule.num_layers} layers per token) by default, "
        f"on {address}/v1; web page: {address}/"
    )
    if host not in ("127.0.0.1", "::1", "localhost") and settings.api_key is None:
        LOG.warning("anyone who can reach this address can use the server, as there is no --api-key")
    if "*" in settings.allow_origins and settings.api_key is None:
        LOG.warning("any web page in a browser that can reach this address can use it, as there is no --api-key")
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(settings.drain) + _GRACE_SECONDS,
        h11_max_incomplete_event_size=2**16,
    )
    # uvicorn shuts down on these signals and raises them again afterwards. Then they are ignored: the exit status is 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    _Server(config, engine, settings.drain).run(sockets=[listening])
    LOG.info("stopped")
    return 0


class _Server(uvicorn.Server):
    """Closes the engine `drain` seconds after the start of a shutdown: unfinished requests then get an error response.

    uvicorn's own limit would cancel the tasks that respond to them.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, drain: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain = drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        ending = loop.call_later(self._drain, lambda: loop.run_in_executor(None, self._engine.close))
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"can't listen on --host {host!r} --port {port}: {reason}") from error


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    LOG.handlers, LOG.propagate = [handler], False
    LOG.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").handlers = [handler]
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
