"""A client of servers with OpenAI's interface, which notes when parts of answers come."""

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from skipdecode.schedule.plan import PLANNED_HEADER

ENDED = "[DONE]"


@dataclass(frozen=True)
class Asked:
    """A system that is asked for texts.

    Attributes:
        url: that `/completions` is added to.
        body: of every request, beside prompt and stream.
        stream: whether the text is to come in parts.
        headers: of every request.
    """

    url: str
    body: Mapping[str, Any]
    stream: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of one request. Times are seconds from its beginning, but for `at`.

    Attributes:
        at: when it was sent, from the beginning of the turn.
        parts: when each part of the text came.
        seconds: when its answer had ended.
        tokens: of the text, as the server counts them; parts where it doesn't.
        error: what went wrong, in few words; None where nothing did.
        planned: the speedup that the server planned, where it says so.
    """

    at: float
    parts: tuple[float, ...]
    seconds: float
    tokens: int
    error: str | None = None
    planned: float | None = None

    def to_list(self) -> list[Any]:
        """Plain values, for a journal."""
        times = [round(part, 6) for part in self.parts]
        return [round(self.at, 6), times, round(self.seconds, 6), self.tokens, self.error, self.planned]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> "Outcome":
        """The outcome that `to_list` described."""
        at, parts, seconds, tokens, error, planned = values
        return cls(at, tuple(parts), seconds, tokens, error, planned)


async def play(
    asked: Asked, prompts: Sequence[str], arrivals: Sequence[float], timeout: float, advance: Callable[[], None]
) -> list[Outcome]:
    """Send each prompt when it comes, whatever has become of the others. Returns an outcome for each.

    Args:
        asked: who is asked.
        prompts, arrivals: and the seconds from now at which they come.
        timeout: seconds after which a request is given up, and counts as an error.
        advance: called as each ends.
    """
    limits = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:
        start = time.perf_counter()

        async def one(prompt: str, arrival: float) -> Outcome:
            await asyncio.sleep(start + arrival - time.perf_counter())
            outcome = await _ask(session, asked, prompt, start)
            advance()
            return outcome

        return await asyncio.gather(*(one(*pair) for pair in zip(prompts, arrivals, strict=True)))


async def _ask(session: aiohttp.ClientSession, asked: Asked, prompt: str, start: float) -> Outcome:
    sent = time.perf_counter()
    parts: list[float] = []
    tokens: int | None = None
    planned: float | None = None
    body = {**asked.body, "prompt": prompt, "stream": asked.stream}

    def outcome(error: str | None = None) -> Outcome:
        counted = len(parts) if tokens is None else tokens
        return Outcome(sent - start, tuple(parts), time.perf_counter() - sent, counted, error, planned)

    try:
        async with session.post(f"{asked.url}/completions", json=body, headers=asked.headers) as response:
            if response.status != 200:
                return outcome(f"status {response.status}")
            planned = _planned(response.headers.get(PLANNED_HEADER))
            if not asked.stream:
                tokens = _count((await response.json())["usage"]["completion_tokens"])
                return outcome()
            ended = False
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == ENDED.encode():
                    ended = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    return outcome("an error in the stream")
                for choice in event["choices"]:
                    if choice.get("text"):
                        parts.append(time.perf_counter() - sent)
                    ended = ended or choice.get("finish_reason") is not None
                usage = event.get("usage") or {}
                tokens = _count(usage["completion_tokens"]) if "completion_tokens" in usage else tokens
            return outcome(None if ended else "the answer broke off")
    except asyncio.TimeoutError:
        return outcome("timeout")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return outcome("no answer of OpenAI's form")
    except (aiohttp.ClientError, OSError) as error:
        return outcome(type(error).__name__)


def _planned(header: str | None) -> float | None:
    """The speedup of a header. Raises ValueError for what is none."""
    planned = None if header is None else float(header)
    if planned is not None and not 0 < planned < math.inf:
        raise ValueError(f"{header} is no speedup")
    return planned


def _count(tokens: Any) -> int:
    """The number of tokens that a server says. Raises ValueError or TypeError for what is none."""
    count = int(tokens)
    if not 0 <= count < 2**31:
        raise ValueError(f"{count} tokens")
    return count
