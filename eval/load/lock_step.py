"""A server of batches that nobody joins: what many build around `generate`, to compare an engine with.

    python -m eval.load.lock_step CHECKPOINT --port 8001

It answers `/v1/completions` with a stream. Requests that wait become a batch, which `skip_generate` decodes at the
speed of the first of them; its texts are sent when the last has ended, and those who came meanwhile wait for that.
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


class Asked(BaseModel):
    """What a request may say; more is left out of account."""

    prompt: str
    max_tokens: int = 64
    speedup: float = 1.0
    stream: bool = False


@dataclass(frozen=True)
class Waiting:
    """A request, and where its text goes: its tokens, the end token among them."""

    asked: Asked
    answer: "asyncio.Future[tuple[list[int], float]]"


def decode(
    model: Any, tokenizer: Any, asked: Sequence[Asked], weights: Weights | None
) -> list[tuple[list[int], float]]:
    """The tokens of each request's text, of one batch, and the speedup that was planned for it."""
    inputs = tokenizer([each.prompt for each in asked], return_tensors="pt", padding=True)
    prompts = inputs["attention_mask"].sum(dim=-1).tolist()
    plan = resolve_plan(model, None, asked[0].speedup, weights=weights, prompts=prompts)
    assert plan.planned is not None  # as a speedup was named
    output = model.generate(
        **inputs.to(model.device),
        custom_generate=skip_generate,
        schedule=plan.schedule,
        weights=weights,
        max_new_tokens=max(each.max_tokens for each in asked),
        do_sample=False,
    )
    texts = []
    for each, row in zip(asked, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        texts.append((row[: min(end, each.max_tokens)], plan.planned))
    return texts


def make_app(model: Any, tokenizer: Any, rows: int, weights: Weights | None) -> FastAPI:
    """The application; it decodes batches of so many rows at most."""
    queue: asyncio.Queue[Waiting] = asyncio.Queue()

    async def work() -> None:
        while True:
            batch = [await queue.get()]
            while len(batch) < rows and not queue.empty():
                batch.append(queue.get_nowait())
            asked = [waiting.asked for waiting in batch]
            try:
                texts = await asyncio.to_thread(decode, model, tokenizer, asked, weights)
            except Exception as error:
                for waiting in batch:
                    waiting.answer.set_exception(error)
                continue
            for waiting, text in zip(batch, texts, strict=True):
                if not waiting.answer.done():  # its client may have gone
                    waiting.answer.set_result(text)

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
    async def completions(asked: Asked) -> Response:
        waiting = Waiting(asked, asyncio.get_running_loop().create_future())
        queue.put_nowait(waiting)

        tokens, planned = await waiting.answer
        headers = {PLANNED_HEADER: f"{planned:.2f}"}
        text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        choice = {"text": text, "finish_reason": "stop"}
        body = {"choices": [choice], "usage": {"completion_tokens": len(tokens)}}
        if not asked.stream:
            return JSONResponse(body, headers=headers)
        events = f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n"
        return Response(events, media_type="text/event-stream", headers=headers)

    return app


def main() -> int:
    """Serve until it is told to end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoint")
    add("--port", type=int, required=True)
    add("--rows", type=int, default=32, help="of a batch (default 32)")
    add("--weights", help="as in skip_generate")
    add("--dtype")
    options = parser.parse_args()
    model, tokenizer = load(options.checkpoint, getattr(torch, options.dtype) if options.dtype else None)
    device: Any = resolve_device(None)  # where skipdecode serve is
    model.to(device)
    tokenizer.padding_side = "left"
    app = make_app(model, tokenizer, options.rows, options.weights)
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", access_log=False)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
