"""The web application: its endpoints, error responses, and access control."""

import asyncio
import contextlib
import hmac
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.engine.engine import Engine
from skipdecode.errors import ConfigError, first_line
from skipdecode.families import decoder_layers
from skipdecode.generate.skip_generate import resolve_plan
from skipdecode.schedule.plan import PLANNED_HEADER, SpeedPlan, show_planned
from skipdecode.schedule.schedule import Over
from skipdecode.serve.field_errors import field_error, show_value
from skipdecode.serve.json_output import JSONGrammars
from skipdecode.serve.metrics import Metrics
from skipdecode.serve.prompt_scores import PromptScorer
from skipdecode.serve.protocol import APIError, BaseRequest, ChatRequest, CompletionRequest, error_body
from skipdecode.serve.request_stream import RunningRequest, Waker
from skipdecode.serve.responses import full_response, stream_events
from skipdecode.serve.settings import ServeSettings
from skipdecode.serve.token_bytes import TokenBytes

LOG = logging.getLogger("skipdecode.serve")
_WITHOUT_KEY = ("/", "/health")  # the page at / has a field for the key
# The page may send requests to this server only, and no other page may embed it.
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def make_app(engine: Engine, tokenizer: Any, settings: ServeSettings, metrics: Metrics | None = None) -> FastAPI:
    """The application, which starts and ends the engine's thread.

    Args:
        engine: decodes the requests.
        tokenizer: of the engine's model.
        settings: defaults, limits and access.
        metrics: what /metrics shows; by default those of this engine.
    """
    metrics = metrics or Metrics(lambda: engine.state)
    token_bytes = TokenBytes(tokenizer)
    scorer = PromptScorer(engine.model, engine.weights)
    grammars = JSONGrammars(tokenizer, engine.vocabulary, _end_tokens(engine))
    started = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.waker = Waker()
        with engine, contextlib.closing(scorer):
            yield

    app = FastAPI(title="skipdecode", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, settings=settings, metrics=metrics)
    if settings.allow_origins:  # outside of the guard: browsers send no key when they ask for permission
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    _add_error_handlers(app)
    page = _page(engine, tokenizer, settings)

    def model() -> dict[str, Any]:
        described = {"id": settings.name, "object": "model", "created": started, "owned_by": "skipdecode"}
        planned = _plan(engine, settings.over, settings.speedup).planned  # it may change while the server runs
        return {**described, "speedup": settings.speedup, "planned_speedup": planned}

    def check_model(name: str) -> None:
        if name != settings.name:
            message = f"the model {name!r} is not served here: this server has {settings.name!r}"
            raise APIError(404, message, "model_not_found", "model")

    @app.get("/", response_class=HTMLResponse)
    @app.head("/", response_class=HTMLResponse, include_in_schema=False)
    def index() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": _CONTENT_SECURITY_POLICY})

    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    def health() -> JSONResponse:
        alive = engine.alive
        return JSONResponse({"status": "ok" if alive else "ending"}, 200 if alive else 503)

    @app.get("/metrics")
    @app.head("/metrics", include_in_schema=False)
    async def read_metrics() -> Response:
        return Response(await metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    @app.head("/v1/models", include_in_schema=False)
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}")
    @app.head("/v1/models/{name:path}", include_in_schema=False)
    def one_model(name: str) -> dict[str, Any]:
        check_model(name)
        return model()

    async def respond(body: BaseRequest, request: Request) -> Response:
        check_model(body.model)
        running = RunningRequest(engine, tokenizer, settings, metrics, app.state.waker, scorer, grammars, body)
        request.state.running = running  # for the log
        await running.start()
        headers = {} if running.planned is None else {PLANNED_HEADER: f"{running.planned:.2f}"}
        if body.stream:
            events = stream_events(running, token_bytes)
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        response = asyncio.ensure_future(full_response(running, token_bytes))
        disconnected = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({response, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if not response.done():
                return Response(status_code=499)  # nobody receives it
            return JSONResponse(response.result(), headers=headers)
        finally:
            running.cancel()
            for task in (response, disconnected):
                task.cancel()

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await respond(body, request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await respond(body, request)

    return app


def _end_tokens(engine: Engine) -> list[int]:
    found = engine.model.generation_config.eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _page(engine: Engine, tokenizer: Any, settings: ServeSettings) -> str:
    """The web page, with the facts about the checkpoint that it needs."""
    config = SkipConfig.of(engine.model.config)
    trained = config.trained_range if config is not None else None
    example = config.task.get("example", "") if config is not None else ""
    tokens = max(len(tokenizer(example)["input_ids"]), 1)

    def reachable(speedup: float) -> float:
        """The speedup, or if the example can't reach it, the largest multiple of 0.25 that it can reach."""
        limit = _plan(engine, settings.over, speedup, [tokens]).limit
        return speedup if limit is None else max(1.0, math.floor(4 * limit) / 4)

    speedup = reachable(settings.speedup)
    known = {
        "model": settings.name,
        "speedup": speedup,
        "fastest": max(reachable(trained[1]) if trained else 1.0, speedup),
        "layers": len(decoder_layers(engine.model)),
        "example": example,
        "tokens": settings.new_tokens,
        "maxTokens": settings.max_new_tokens,
        "key": settings.api_key is not None,
        "chat": tokenizer.chat_template is not None,
    }
    text = files("skipdecode.serve").joinpath("page.html").read_text(encoding="utf-8")
    return text.replace("{{known}}", json.dumps(known).replace("<", "\\u003c"))


def _plan(engine: Engine, over: Over | None, speedup: float, prompts: Sequence[int] | None = None) -> SpeedPlan:
    """The plan for a target speedup, for prompts of these lengths or, by default, of the lengths in training."""
    return resolve_plan(engine.model, None, speedup, over=over, weights=engine.weights, prompts=prompts)


def _add_error_handlers(app: FastAPI) -> None:
    """Give all errors OpenAI's form."""

    def response(status: int, message: str, *details: str | None, headers: Any = None) -> JSONResponse:
        return JSONResponse(error_body(status, message, *details), status, headers)

    @app.exception_handler(APIError)
    async def api_error(_: Request, error: APIError) -> JSONResponse:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(ConfigError)
    async def config_error(_: Request, error: ConfigError) -> JSONResponse:
        return response(400, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first, *others = error.errors()
        if first["type"] == "json_invalid":
            reason = f"{first['ctx']['error']} at character {first['loc'][1]}"
            return response(400, f"the body is not valid JSON: {reason}", "invalid_json")
        message, field = field_error(first)
        more = f" (and {len(others)} more)" if others else ""
        return response(400, f"{message}{more}", "invalid_value", field)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message, code, called = str(error.detail), None, f"{request.method} {request.url.path}"
        if error.status_code == 400 and error.__cause__ is not None:  # FastAPI could not read the body
            message, code = f"the body is not valid JSON: {first_line(error.__cause__)}", "invalid_json"
        elif error.status_code == 404:
            message = f"{called} doesn't exist: there are /v1/models, /v1/completions and /v1/chat/completions"
        elif error.status_code == 405:
            message = f"{called} is not allowed: the method is {(error.headers or {}).get('Allow', 'another')}"
        return response(error.status_code, message, code, headers=error.headers)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        return response(500, "internal server error: see the server's log")


class Guard:
    """Middleware that checks the API key and the type and size of bodies, and logs every request."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.monotonic(), 499

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope.setdefault("state", {})
        self._metrics.open_requests += 1
        try:
            error = self._check(scope)
            if error is not None:
                await JSONResponse(error.body, error.status, error.headers)(scope, receive, watch)
            else:
                await self._app(scope, self._limited(receive), watch)
        finally:
            self._metrics.open_requests -= 1
            self._log(scope, status, time.monotonic() - start)

    def _check(self, scope: Scope) -> APIError | None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        key = self._settings.api_key
        if key is not None and scope["path"] not in _WITHOUT_KEY:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, f"Bearer {key}".encode()):
                return APIError(
                    401, "the API key is missing or wrong", "invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._settings.max_bytes:
            return APIError(413, self._too_large, "too_large")
        return self._check_content_type(scope, headers)

    def _check_content_type(self, scope: Scope, headers: Mapping[bytes, bytes]) -> APIError | None:
        """Treat bodies as JSON whatever their content type, as `curl -d` declares a form.

        Only web pages of other origins must declare JSON: browsers then ask the server for permission first.
        """
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if scope["method"] != "POST" or kind == b"application/json":
            return None
        origin, allowed = headers.get(b"origin"), self._settings.allow_origins
        if origin is not None and "*" not in allowed and origin.decode("latin-1") not in allowed:
            message = f"the Content-Type is {show_value(kind.decode('latin-1'))}: a web page must send application/json"
            return APIError(415, message, "unsupported_media_type")
        kept = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-type"]
        scope["headers"] = [*kept, (b"content-type", b"application/json")]
        return None

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self._settings.max_bytes} bytes, the maximum on this server"

    def _limited(self, receive: Receive) -> Callable[[], Any]:
        """`receive` with the size limit, for bodies that are sent without a Content-Length."""
        count = 0

        async def limited() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self._settings.max_bytes:
                raise HTTPException(413, self._too_large)
            return message

        return limited

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "other")  # not the client's own path, which could be anything
        self._metrics.requests.labels(path, str(status)).inc()
        running: RunningRequest | None = scope["state"].get("running")
        line = f"{scope['method']} {path} {status} {seconds:.3f} s"
        if running is not None:
            count = f"{len(running.choices)} sequences, " if len(running.choices) != 1 else ""
            speed = "lossless" if running.body.lossless else show_planned(running.speedup, running.fallback_speedup)
            line += (
                f", {count}{speed}, {running.prompt_tokens} + {running.new_tokens} tokens, "
                f"{running.layers_per_token:.2f} layers per token"
            )
        LOG.info(line)
