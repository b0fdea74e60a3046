"""The server as an application of Ray Serve, which runs replicas of it on the GPUs or CPUs of one or several machines.

    serve run skipdecode.serve.ray:app model=outputs/quickstart speedup=2 replicas=2

Ray Serve imports this module, and `skipdecode serve --replicas`, as it needs the packages of skipdecode[ray].
"""

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import ray
import torch
from pydantic import TypeAdapter, ValidationError
from ray import serve
from ray.serve.exceptions import RayServeException

from skipdecode.errors import ConfigError, unknown
from skipdecode.serve.app import LOG, make_app
from skipdecode.serve.main import GRACE_SECONDS, address_of, listen, load_engine, log_to_stderr, warn_of_access
from skipdecode.serve.metrics import Metrics, merged_page
from skipdecode.serve.settings import ServerOptions

NAME = "skipdecode"  # of the application and of its deployment
# Requests that a replica takes beside those of its engine: probes, and requests that the engine refuses as it is full.
_SPARE_REQUESTS = 64
_METRICS_SECONDS = 10  # in which replicas must give their metrics: the time that Prometheus waits by default
_SENDING_SECONDS = 0.5  # in which Ray Serve's proxy sends the ends of the last responses
_SESSION_ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"


class ReplicatedMetrics(Metrics):
    """The metrics of a replica, whose page at /metrics shows all replicas: which of them answers is chance."""

    async def page(self) -> bytes:
        handle = serve.get_deployment_handle(NAME, serve.get_replica_context().app_name)
        answers = handle.broadcast("own_metrics")
        pages = await asyncio.wait_for(answers.results_async(return_exceptions=True), _METRICS_SECONDS)
        return merged_page(dict(page for page in pages if not isinstance(page, Exception)))


@serve.deployment(name=NAME, health_check_period_s=5, graceful_shutdown_wait_loop_s=0.5)
@serve.ingress()
class Replica:
    """One server. Ray Serve starts it in a process of its own, and replaces it when it has died."""

    def __init__(self, options: ServerOptions) -> None:
        self._engine, self._tokenizer = load_engine(options, torch.device(options.device or "cpu"))
        self._settings = options.settings()
        self._metrics = ReplicatedMetrics(lambda: self._engine.state)
        self._draining = False

    def __serve_build_asgi_app__(self) -> Any:
        return make_app(self._engine, self._tokenizer, self._settings, self._metrics)

    def own_metrics(self) -> tuple[str, bytes]:
        """The replica's id and metrics."""
        return serve.get_replica_context().replica_id.unique_id, self._metrics.own_page()

    def check_health(self) -> None:
        """Raise an error if the engine has failed, for which Ray Serve replaces the replica."""
        if not (self._engine.alive or self._draining):
            raise RuntimeError("the engine has ended")

    async def drain(self) -> None:
        """Finish the running requests, and answer new ones with status 503."""
        self._draining = True
        await asyncio.to_thread(self._engine.drain, self._settings.drain)
        await asyncio.to_thread(self._engine.close)  # requests that haven't ended get an error
        deadline = time.monotonic() + GRACE_SECONDS
        while self._metrics.open_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.05)


def app(arguments: Mapping[str, Any]) -> serve.Application:
    """The application, for `serve run skipdecode.serve.ray:app NAME=VALUE ...` and for Ray Serve's config files.

    Args:
        arguments: `model`, the checkpoint, and options of `skipdecode serve` with underscores in their names. There are
            as many `replicas` as this machine has GPUs by default, each with `threads` CPU threads. With
            `sessions=true`, requests with the same header X-Session-ID go to the same replica; otherwise the less busy
            of two random ones gets a request.

    Raises:
        ConfigError: for unknown arguments and values out of range.
    """
    arguments = dict(arguments)
    sessions = str(arguments.pop("sessions", "false")).lower()
    if sessions not in ("true", "false"):
        raise ConfigError(f"sessions is {sessions!r}: it must be true or false")
    names = {field.name for field in fields(ServerOptions)} - {"checkpoint"}
    for name in arguments.keys() - names - {"model"}:
        raise unknown("argument", name, {*names, "model", "sessions"})
    if not arguments.get("model"):
        raise ConfigError("name the checkpoint: model=FOLDER, or a repository of the Hugging Face Hub")
    arguments["checkpoint"] = arguments.pop("model")
    if isinstance(arguments.get("allow_origin"), str):
        arguments["allow_origin"] = arguments["allow_origin"].split(",")
    try:
        options = TypeAdapter(ServerOptions).validate_python(arguments)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]} is {first['input']!r}: {first['msg']}") from error
    return _application(_resolved(options), sessions=sessions == "true")


def _resolved(options: ServerOptions) -> ServerOptions:
    """The options with what they leave to this machine and its environment, which aren't those of the replicas."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device.startswith("cuda")
    replicas = options.replicas or (max(1, torch.cuda.device_count()) if gpu else 1)
    threads = options.threads or max(1, len(os.sched_getaffinity(0)) // replicas)
    key = options.settings().api_key
    return replace(options, device="cuda" if gpu else device, replicas=replicas, threads=threads, api_key=key)


def _application(options: ServerOptions, *, sessions: bool = False) -> serve.Application:
    router = {"request_router_config": {"request_router_class": _SESSION_ROUTER}} if sessions else {}
    return Replica.options(  # type: ignore[attr-defined]  # the decorator made a Deployment of it
        num_replicas=options.replicas,
        ray_actor_options={"num_cpus": options.threads, "num_gpus": int(options.device == "cuda")},
        max_ongoing_requests=options.rows + options.queue + _SPARE_REQUESTS,
        graceful_shutdown_timeout_s=options.drain + GRACE_SECONDS,
        **router,
    ).bind(options)


def run_replicas(options: ServerOptions, host: str, port: int) -> int:
    """Serve on this machine, by a Ray cluster of its own, until SIGTERM or Ctrl-C. Returns the exit status.

    Port 0 stands for any free one. Raises ConfigError if the server can't listen on this address, or if the replicas
    don't start.
    """
    options, settings = _resolved(options), options.settings()
    assert options.replicas is not None
    assert options.threads is not None
    with listen(host, port) as listening:  # Ray's server opens the port anew
        address, port = address_of(host, listening), listening.getsockname()[1]
    log_to_stderr()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default would let every other program go first
    ray.init(
        "local",
        num_cpus=options.replicas * options.threads,
        include_dashboard=False,
        object_store_memory=100 * 2**20,  # requests don't go through it
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "WARNING"})
        try:
            handle = serve.run(_application(options), name=NAME)
        except RuntimeError as error:  # its message has the stack of the replica
            raise ConfigError(f"the replicas don't start: {str(error).strip().splitlines()[-1]}") from error
        LOG.info(
            f"serving {settings.name} at {settings.speedup:g}x by default, by {options.replicas} replicas, on "
            f"{address}/v1; web page: {address}/"
        )
        warn_of_access(host, settings)
        ended = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):  # Ray's own handler would leave at once
            signal.signal(number, lambda *_: ended.set())
        ended.wait()
        # Replicas that drain answer new requests with status 503; an application that Ray Serve deletes, with 404.
        with contextlib.suppress(RayServeException, TimeoutError):  # no replica is left, or one has stopped responding
            answers = handle.broadcast("drain")
            answers.results(timeout_s=options.drain + 2 * GRACE_SECONDS, return_exceptions=True)
        time.sleep(_SENDING_SECONDS)
    finally:
        ray.shutdown()
    LOG.info("stopped")
    return 0
