"""A client of servers with OpenAI's API that records when each part of an answer arrives."""

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from skipdecode.schedule.plan import PLANNED_HEADER

STREAM_END = b"[DONE]"


@dataclass(frozen=True)
class Endpoint:
    """A system under test.

    Attributes:
        url: the base address, without `/completions`.
        body: the fields of every request, except prompt and stream.
        stream: whether answers are streamed.
        headers: the HTTP headers of every request.
    """

    url: str
    body: Mapping[str, Any]
    stream: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The result of one request. Times are seconds since it was sent, except `at`.

    Attributes:
        at: when it was sent, in seconds since the start of the turn.
        parts: when each part of the answer arrived.
        seconds: when the answer was complete.
        tokens: generated tokens as counted by the server; the number of parts where it doesn't count.
        error: the reason of a failure; None for success.
        planned: the speedup that the server planned, where it reports one.
    """

    at: float
    parts: tuple[float, ...]
    seconds: float
    tokens: int
    error: str | None = None
    planned: float | None = None

    def to_list(self) -> list[Any]:
        """JSON values, for the journal."""
        times = [round(part, 6) for part in self.parts]
        return [round(self.at, 6), times, round(self.seconds, 6), self.tokens, self.error, self.planned]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> "Outcome":
        """The outcome that `to_list` described."""
        at, parts, seconds, tokens, error, planned = values
        return cls(at, tuple(parts), seconds, tokens, error, planned)


async def play(
    endpoint: Endpoint, prompts: Sequence[str], arrivals: Sequence[float], timeout: float, advance: Callable[[], None]
) -> list[Outcome]:
    """Send each prompt at its arrival time, independently of the others. Returns an outcome for each.

    Args:
        endpoint: the system under test.
        prompts: the prompts.
        arrivals: the arrival time of each prompt, in seconds from now.
        timeout: seconds after which a request fails.
        advance: called when a request has ended.
    """
    limits = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:
        start = time.perf_counter()

        async def one(prompt: str, arrival: float) -> Outcome:
            await asyncio.sleep(start + arrival - time.perf_counter())
            outcome = await _send(session, endpoint, prompt, start)
            advance()
            return outcome

        return await asyncio.gather(*(one(*pair) for pair in zip(prompts, arrivals, strict=True)))


async def _send(session: aiohttp.ClientSession, endpoint: Endpoint, prompt: str, start: float) -> Outcome:
    sent = time.perf_counter()
    parts: list[float] = []
    tokens: int | None = None
    planned: float | None = None
    body = {**endpoint.body, "prompt": prompt, "stream": endpoint.stream}

    def outcome(error: str | None = None) -> Outcome:
        counted = len(parts) if tokens is None else tokens
        return Outcome(sent - start, tuple(parts), time.perf_counter() - sent, counted, error, planned)

    try:
        async with session.post(f"{endpoint.url}/completions", json=body, headers=endpoint.headers) as response:
            if response.status != 200:
                return outcome(f"status {response.status}")
            planned = _planned(response.headers.get(PLANNED_HEADER))
            if not endpoint.stream:
                tokens = _count((await response.json())["usage"]["completion_tokens"])
                return outcome()
            ended = False
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == STREAM_END:
                    ended = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    return outcome("error event in the stream")
                for choice in event["choices"]:
                    if choice.get("text"):
                        parts.append(time.perf_counter() - sent)
                    ended = ended or choice.get("finish_reason") is not None
                usage = event.get("usage") or {}
                tokens = _count(usage["completion_tokens"]) if "completion_tokens" in usage else tokens
            return outcome(None if ended else "incomplete answer")
    except asyncio.TimeoutError:
        return outcome("timeout")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return outcome("not an answer of OpenAI's API")
    except (aiohttp.ClientError, OSError) as error:
        return outcome(type(error).__name__)


def _planned(header: str | None) -> float | None:
    """The speedup in a header. Raises ValueError for other values."""
    planned = None if header is None else float(header)
    if planned is not None and not 0 < planned < math.inf:
        raise ValueError(f"{header} is not a speedup")
    return planned


def _count(tokens: Any) -> int:
    """The number of tokens that a server reports. Raises ValueError or TypeError for other values."""
    count = int(tokens)
    if not 0 <= count < 2**31:
        raise ValueError(f"{count} tokens")
    return count
