"""The response to a request, as one JSON object or as a stream of server-sent events."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from skipdecode.serve.protocol import APIError, BaseRequest, ChatRequest
from skipdecode.serve.request_stream import Choice, Chunk, RunningRequest
from skipdecode.serve.token_bytes import TokenBytes


class Envelope:
    """The fields that the response to a request, or all chunks of a stream, have in common."""

    def __init__(self, request: BaseRequest, skipdecode: Mapping[str, Any]) -> None:
        self.skipdecode = dict(skipdecode)  # not in OpenAI's API
        self.chat = isinstance(request, ChatRequest)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = request.model
        self.include_usage = request.include_usage

    def body(self, choices: list[dict[str, Any]], *, chunk: bool = False, **more: Any) -> dict[str, Any]:
        """The body of a response, or of a chunk of a stream, with these choices."""
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        if chunk and self.include_usage:
            more = {"usage": None, **more}  # every chunk has the field; it is null in all but the last
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "skipdecode": self.skipdecode,
            **more,
        }

    def choice(
        self,
        index: int,
        text: str,
        end: str | None,
        logprobs: Any,
        *,
        calls: Sequence[Mapping[str, Any]] = (),
        chunk: bool = False,
        first: bool = False,
    ) -> dict[str, Any]:
        """One choice of a response, or what it gained in a chunk of a stream."""
        choice: dict[str, Any] = {"index": index, "finish_reason": end, "logprobs": logprobs}
        if not self.chat:
            return {**choice, "text": text}
        message: dict[str, Any] = {"content": None if calls and not text else text}
        if calls:
            message["tool_calls"] = list(calls)
        if first or not chunk:
            message["role"] = "assistant"
        return {**choice, "delta" if chunk else "message": message}


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """The token counts of a request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }


async def full_response(running: RunningRequest, token_bytes: TokenBytes) -> dict[str, Any]:
    """The response as one object, once every sequence has ended. Raises APIError if one fails."""
    envelope = Envelope(running.body, _speed(running))
    async for _ in running.chunks():
        pass
    choices = [
        envelope.choice(
            choice.index,
            choice.text,
            choice.end,
            _logprobs(envelope, token_bytes, choice, range(len(choice.logprobs))),
            calls=choice.parser.calls if choice.parser is not None else (),
        )
        for choice in running.choices
    ]
    if running.body.details:
        envelope.skipdecode["layers_per_token"] = running.layers_per_token
    return envelope.body(choices, usage=usage(running.prompt_tokens, running.new_tokens))


async def stream_events(running: RunningRequest, token_bytes: TokenBytes) -> AsyncIterator[str]:
    """The response as events. An error becomes an event too, as the HTTP status has been sent by then."""
    envelope = Envelope(running.body, _speed(running))
    try:
        if envelope.chat:
            roles = [envelope.choice(c.index, "", None, None, chunk=True, first=True) for c in running.choices]
            yield server_sent_event(envelope.body(roles, chunk=True))
        for choice in running.choices:
            if choice.echo:
                logprobs = _logprobs(envelope, token_bytes, choice, range(len(choice.logprobs)))
                echoed = envelope.choice(choice.index, choice.echo, None, logprobs, chunk=True)
                yield server_sent_event(envelope.body([echoed], chunk=True))
        async for chunks in running.chunks():
            # All events are sent together. Sent one by one, they would fall behind the steps of a fast model.
            if events := "".join(_events(running, envelope, token_bytes, chunks)):
                yield events
        if running.body.include_usage:
            yield server_sent_event(
                envelope.body([], chunk=True, usage=usage(running.prompt_tokens, running.new_tokens))
            )
        yield "data: [DONE]\n\n"
    except APIError as error:
        yield server_sent_event(error.body)
    finally:
        running.cancel()


def _events(
    running: RunningRequest, envelope: Envelope, token_bytes: TokenBytes, chunks: Sequence[Chunk]
) -> Iterator[str]:
    """An event for each token if the request wants more than text, otherwise one for each sequence that grew."""
    body = running.body
    if body.logprobs_count is None and not body.details:
        texts: dict[int, str] = {}
        new_calls: dict[int, list[dict[str, Any]]] = {}
        for chunk in chunks:
            index = chunk.choice.index
            texts[index] = texts.get(index, "") + chunk.text
            new_calls.setdefault(index, []).extend(_numbered(chunk))
        for index, text in texts.items():
            end = running.choices[index].end
            if text or end or new_calls[index]:
                choice = envelope.choice(index, text, end, None, calls=new_calls[index], chunk=True)
                yield server_sent_event(envelope.body([choice], chunk=True))
        return
    for chunk in chunks:
        places = [chunk.place] if body.logprobs_count is not None and chunk.choice.tokens else []
        logprobs = _logprobs(envelope, token_bytes, chunk.choice, places)
        calls = _numbered(chunk)
        choice = envelope.choice(chunk.choice.index, chunk.text, chunk.end, logprobs, calls=calls, chunk=True)
        event = envelope.body([choice], chunk=True)
        if body.details:
            event["skipdecode"] = {
                **envelope.skipdecode,
                "token": chunk.generated.token,
                "layers": chunk.layers,
                "seconds": chunk.generated.at - chunk.choice.answer.times.submitted,
            }
        yield server_sent_event(event)


def _numbered(chunk: Chunk) -> list[dict[str, Any]]:
    """The new tool calls of a chunk, with their places among all calls of the sequence."""
    first = len(chunk.choice.parser.calls) - len(chunk.calls) if chunk.choice.parser is not None else 0
    return [{"index": first + n, **call} for n, call in enumerate(chunk.calls)]


def server_sent_event(body: dict[str, Any]) -> str:
    """An event of a stream."""
    return f"data: {json.dumps(body)}\n\n"  # in ASCII: some clients split lines at U+2028 and U+0085


def _speed(running: RunningRequest) -> dict[str, Any]:
    return {"speedup": running.speedup, "planned_speedup": running.planned}


def _logprobs(
    envelope: Envelope, token_bytes: TokenBytes, choice: Choice, places: Sequence[int]
) -> dict[str, Any] | None:
    """The `logprobs` field for the tokens at these places of a sequence, in the form of each endpoint."""
    if not places:
        return None
    first = token_bytes.first(each.token for each in choice.logprobs)

    def value(place: int, token: int, logprob: float | None) -> dict[str, Any]:
        raw = token_bytes.added(token, first=place <= first)
        return {"token": token_bytes.name(token, raw), "logprob": logprob, "bytes": list(raw)}

    def values(place: int) -> dict[str, Any]:
        generated = choice.logprobs[place]
        top = [value(place, *pair) for pair in generated.top]
        return {**value(place, generated.token, generated.logprob), "top_logprobs": top}

    found = [values(place) for place in places]
    if envelope.chat:
        return {"content": found, "refusal": None}
    return {
        "tokens": [each["token"] for each in found],
        "token_logprobs": [each["logprob"] for each in found],
        # The first token of a prompt that is echoed has no log probability.
        "top_logprobs": [None if each["logprob"] is None else _by_name(each["top_logprobs"]) for each in found],
        "text_offset": [choice.offsets[place] for place in places],
    }


def _by_name(top: Sequence[dict[str, Any]]) -> dict[str, float]:
    by_name: dict[str, float] = {}
    for each in top:
        by_name.setdefault(each["token"], each["logprob"])  # of two tokens with the same name the likelier comes first
    return by_name
