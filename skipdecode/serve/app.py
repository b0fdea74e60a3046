"""The server's addresses."""

import asyncio
import hmac
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
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
from skipdecode.serve.field_errors import field_error, shown
from skipdecode.serve.metrics import Metrics
from skipdecode.serve.protocol import Asked, ChatAsked, CompletionAsked, Failure, error_body
from skipdecode.serve.request_stream import Bell, Job
from skipdecode.serve.responses import events, whole
from skipdecode.serve.settings import ServeSettings
from skipdecode.serve.token_bytes import Spelling

LOG = logging.getLogger("skipdecode.serve")
_OPEN = ("/", "/health")  # without a key: the page asks for it
# The page asks this server and nobody else, and no other page may show it.
_POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def make_app(engine: Engine, tokenizer: Any, settings: ServeSettings) -> FastAPI:
    """The application: it starts the engine's thread, and ends it."""
    metrics = Metrics(lambda: engine.state)
    spelling = Spelling(tokenizer)
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.bell = Bell()
        with engine:
            yield

    app = FastAPI(title="skipdecode", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, settings=settings, metrics=metrics)
    if settings.allow_origins:  # around the guard: browsers ask for permission without a key, and read its errors too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    _add_errors(app)
    page = _page(engine, tokenizer, settings)

    def model() -> dict[str, Any]:
        described = {"id": settings.name, "object": "model", "created": started, "owned_by": "skipdecode"}
        planned = _plan(engine, settings.over, settings.speedup).planned  # asked each time: as texts are decoded now
        return {**described, "speedup": settings.speedup, "planned_speedup": planned}

    def check_model(name: str) -> None:
        if name != settings.name:
            message = f"the model {name!r} is not served here: this server has {settings.name!r}"
            raise Failure(404, message, "model_not_found", "model")

    @app.get("/", response_class=HTMLResponse)
    @app.head("/", response_class=HTMLResponse, include_in_schema=False)
    def index() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})

    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    def health() -> JSONResponse:
        alive = engine.alive
        return JSONResponse({"status": "ok" if alive else "ending"}, 200 if alive else 503)

    @app.get("/metrics")
    @app.head("/metrics", include_in_schema=False)
    def read_metrics() -> Response:
        return Response(metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    @app.head("/v1/models", include_in_schema=False)
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}")
    @app.head("/v1/models/{name:path}", include_in_schema=False)
    def one_model(name: str) -> dict[str, Any]:
        check_model(name)
        return model()

    async def answer(asked: Asked, request: Request) -> Response:
        check_model(asked.model)
        job = Job(engine, tokenizer, settings, metrics, app.state.bell, asked)
        request.state.job = job  # for the line of the log
        await job.start()
        headers = {} if job.planned is None else {PLANNED_HEADER: f"{job.planned:.2f}"}
        if asked.stream:
            return StreamingResponse(events(job, spelling), media_type="text/event-stream", headers=headers)
        work, gone = asyncio.ensure_future(whole(job, spelling)), asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=499)  # nobody reads it
            return JSONResponse(work.result(), headers=headers)
        finally:
            job.cancel()
            for task in (work, gone):
                task.cancel()

    @app.post("/v1/completions")
    async def completions(asked: CompletionAsked, request: Request) -> Response:
        return await answer(asked, request)

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatAsked, request: Request) -> Response:
        return await answer(asked, request)

    return app


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass  # its body has been read: nothing else comes


def _page(engine: Engine, tokenizer: Any, settings: ServeSettings) -> str:
    """The page with what it is to know of the checkpoint."""
    remembered = SkipConfig.of(engine.model.config)
    trained = remembered.trained_range if remembered is not None else None
    example = remembered.task.get("example", "") if remembered is not None else ""
    tokens = max(len(tokenizer(example)["input_ids"]), 1)

    def reached(speedup: float) -> float:
        """The speedup, or the largest in quarters that a prompt such as the example's can be decoded at."""
        limit = _plan(engine, settings.over, speedup, [tokens]).limit
        return speedup if limit is None else max(1.0, math.floor(4 * limit) / 4)

    speedup = reached(settings.speedup)
    known = {
        "model": settings.name,
        "speedup": speedup,
        "fastest": max(reached(trained[1]) if trained else 1.0, speedup),
        "layers": len(decoder_layers(engine.model)),
        "example": example,
        "tokens": settings.new_tokens,
        "mostTokens": settings.most_new_tokens,
        "key": settings.api_key is not None,
    }
    text = files("skipdecode.serve").joinpath("page.html").read_text(encoding="utf-8")
    return text.replace("{{known}}", json.dumps(known).replace("<", "\\u003c"))


def _plan(engine: Engine, over: Over | None, speedup: float, prompts: Sequence[int] | None = None) -> SpeedPlan:
    """What the engine decodes a speedup with, of prompts of so many tokens or of those of the training."""
    return resolve_plan(engine.model, None, speedup, over=over, weights=engine.weights, prompts=prompts)


def _add_errors(app: FastAPI) -> None:
    """Errors in OpenAI's form, whatever they come from."""

    def error(status: int, message: str, *details: str | None, headers: Any = None) -> JSONResponse:
        return JSONResponse(error_body(status, message, *details), status, headers)

    @app.exception_handler(Failure)
    async def failure(_: Request, found: Failure) -> JSONResponse:
        return JSONResponse(found.body, found.status, found.headers)

    @app.exception_handler(ConfigError)
    async def config_error(_: Request, found: ConfigError) -> JSONResponse:
        return error(400, str(found))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, found: RequestValidationError) -> JSONResponse:
        first, *others = found.errors()
        if first["type"] == "json_invalid":
            reason = f"{first['ctx']['error']} at character {first['loc'][1]}"
            return error(400, f"the body is not valid JSON: {reason}", "invalid_json")
        message, field = field_error(first)
        more = f" (and {len(others)} more)" if others else ""
        return error(400, f"{message}{more}", "invalid_value", field)

    @app.exception_handler(HTTPException)
    async def http(request: Request, found: HTTPException) -> JSONResponse:
        message, code, asked = str(found.detail), None, f"{request.method} {request.url.path}"
        if found.status_code == 400 and found.__cause__ is not None:  # FastAPI could not read the body
            message, code = f"the body is not valid JSON: {first_line(found.__cause__)}", "invalid_json"
        elif found.status_code == 404:
            message = f"{asked} is not served here: there are /v1/models, /v1/completions and /v1/chat/completions"
        elif found.status_code == 405:
            message = f"{asked} is not allowed: the method is {(found.headers or {}).get('Allow', 'another')}"
        return error(found.status_code, message, code, headers=found.headers)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, found: Exception) -> JSONResponse:
        return error(500, "the server has failed; its log says more")


class Guard:
    """What comes before every address: the key, the kind and size of bodies; and the line of the log behind it."""

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
        try:
            refused = self._refused(scope)
            if refused is not None:
                await JSONResponse(refused.body, refused.status, refused.headers)(scope, receive, watch)
            else:
                await self._app(scope, self._counted(receive), watch)
        finally:
            self._log(scope, status, time.monotonic() - start)

    def _refused(self, scope: Scope) -> Failure | None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        key = self._settings.api_key
        if key is not None and scope["path"] not in _OPEN:
            shown = headers.get(b"authorization", b"")
            if not hmac.compare_digest(shown, f"Bearer {key}".encode()):
                return Failure(
                    401, "the API key is missing or wrong", "invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._settings.most_bytes:
            return Failure(413, self._too_large, "too_large")
        return self._refused_kind(scope, headers)

    def _refused_kind(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Failure | None:
        """Bodies are JSON, whatever a client calls them: curl says it sends a form.

        A page of somebody else's must call them JSON, because browsers then ask first whether it may send them.
        """
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if scope["method"] != "POST" or kind == b"application/json":
            return None
        origin, allowed = headers.get(b"origin"), self._settings.allow_origins
        if origin is not None and "*" not in allowed and origin.decode("latin-1") not in allowed:
            message = f"the Content-Type is {shown(kind.decode('latin-1'))}: a page must send application/json"
            return Failure(415, message, "unsupported_media_type")
        kept = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-type"]
        scope["headers"] = [*kept, (b"content-type", b"application/json")]
        return None

    @property
    def _too_large(self) -> str:
        return f"the body is larger than the {self._settings.most_bytes} bytes that this server reads"

    def _counted(self, receive: Receive) -> Callable[[], Any]:
        """`receive` that gives up a body that grows too large: one may come without saying its length."""
        count = 0

        async def counted() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self._settings.most_bytes:
                raise HTTPException(413, self._too_large)
            return message

        return counted

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "other")  # not what the client wrote: it could be anything
        self._metrics.requests.labels(path, str(status)).inc()
        job: Job | None = scope["state"].get("job")
        line = f"{scope['method']} {path} {status} {seconds:.3f} s"
        if job is not None:
            texts = f"{len(job.choices)} texts, " if len(job.choices) != 1 else ""
            speed = "lossless" if job.asked.lossless else show_planned(job.speedup, job.shortfall)
            line += (
                f", {texts}{speed}, {job.prompt_tokens} + {job.new_tokens} tokens, "
                f"{job.layers_per_token:.2f} layers a token"
            )
        LOG.info(line)
