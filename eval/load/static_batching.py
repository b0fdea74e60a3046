"""A server with static batching around `skip_generate`, as a baseline for continuous batching.

    python -m eval.load.static_batching CHECKPOINT --port 8001

It serves `/v1/completions`. All waiting requests form a batch, which `skip_generate` decodes at the speed of the first
request. No request joins a running batch, and answers are sent when the last sequence of the batch has ended.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from skipdecode import load, skip_generate
from skipdecode.cli.device import resolve_device
from skipdecode.cli.process import run_command
from skipdecode.generate.skip_generate import resolve_plan
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.plan import PLANNED_HEADER


class CompletionRequest(BaseModel):
    """The body of a request; other fields are ignored."""

    prompt: str
    max_tokens: int = 64
    speedup: float = 1.0
    stream: bool = False


@dataclass(frozen=True)
class Waiting:
    """A waiting request, and the future of its tokens (with the end token) and planned speedup."""

    request: CompletionRequest
    answer: "asyncio.Future[tuple[list[int], float]]"


def decode(
    model: Any, tokenizer: Any, requests: Sequence[CompletionRequest], weights: Weights | None
) -> list[tuple[list[int], float]]:
    """Decode a batch. Returns the generated tokens of each request, and the planned speedup."""
    inputs = tokenizer([request.prompt for request in requests], return_tensors="pt", padding=True)
    prompts = inputs["attention_mask"].sum(dim=-1).tolist()
    plan = resolve_plan(model, None, requests[0].speedup, weights=weights, prompts=prompts)
    assert plan.planned is not None  # a speedup was given
    output = model.generate(
        **inputs.to(model.device),
        custom_generate=skip_generate,
        schedule=plan.schedule,
        weights=weights,
        max_new_tokens=max(request.max_tokens for request in requests),
        do_sample=False,
    )
    answers = []
    for request, row in zip(requests, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        answers.append((row[: min(end, request.max_tokens)], plan.planned))
    return answers


def make_app(model: Any, tokenizer: Any, rows: int, weights: Weights | None) -> FastAPI:
    """The application, which decodes batches of at most `rows` sequences."""
    queue: asyncio.Queue[Waiting] = asyncio.Queue()

    async def work() -> None:
        while True:
            batch = [await queue.get()]
            while len(batch) < rows and not queue.empty():
                batch.append(queue.get_nowait())
            requests = [waiting.request for waiting in batch]
            try:
                answers = await asyncio.to_thread(decode, model, tokenizer, requests, weights)
            except Exception as error:
                for waiting in batch:
                    waiting.answer.set_exception(error)
                continue
            for waiting, answer in zip(batch, answers, strict=True):
                if not waiting.answer.done():  # the client may have disconnected
                    waiting.answer.set_result(answer)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(work())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    def health() -> str:
        return "ok"

    @app.post("/v1/completions")
    async def completions(request: CompletionRequest) -> Response:
        waiting = Waiting(request, asyncio.get_running_loop().create_future())
        queue.put_nowait(waiting)
        tokens, planned = await waiting.answer
        headers = {PLANNED_HEADER: f"{planned:.2f}"}
        text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        choice = {"text": text, "finish_reason": "stop"}
        body = {"choices": [choice], "usage": {"completion_tokens": len(tokens)}}
        if not request.stream:
            return JSONResponse(body, headers=headers)
        events = f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n"
        return Response(events, media_type="text/event-stream", headers=headers)

    return app


def main() -> int:
    """Serve until the process is terminated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoint")
    add("--port", type=int, required=True)
    add("--rows", type=int, default=32, help="maximum number of sequences in a batch (default 32)")
    add("--weights", help="weight format, as in skip_generate")
    add("--dtype")
    options = parser.parse_args()
    model, tokenizer = load(options.checkpoint, getattr(torch, options.dtype) if options.dtype else None)
    device: Any = resolve_device(None)  # the default of skipdecode serve
    model.to(device)
    tokenizer.padding_side = "left"
    app = make_app(model, tokenizer, options.rows, options.weights)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", access_log=False)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
