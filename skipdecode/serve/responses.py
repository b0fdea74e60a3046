"""The answers to a request, in one piece or as a stream of server-sent events."""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from skipdecode.serve.protocol import Envelope, Failure, usage
from skipdecode.serve.request_stream import Choice, Job, Part
from skipdecode.serve.token_bytes import Spelling


async def whole(job: Job, spelling: Spelling) -> dict[str, Any]:
    """The answer in one piece, once every text has ended. Raises Failure."""
    envelope = Envelope(job.asked, _speed(job))
    async for _ in job.parts():
        pass
    choices = [
        envelope.choice(
            choice.index,
            choice.words.text,
            choice.end,
            _logprobs(envelope, spelling, choice, range(len(choice.logprobs))),
        )
        for choice in job.choices
    ]
    if job.asked.details:
        envelope.skipdecode["layers_per_token"] = job.layers_per_token
    return envelope.body(choices, usage=usage(job.prompt_tokens, job.new_tokens))


async def events(job: Job, spelling: Spelling) -> AsyncIterator[str]:
    """The answer as it comes. What goes wrong is an event, too: the status has been sent."""
    envelope = Envelope(job.asked, _speed(job))
    try:
        if envelope.chat:
            yield _event(
                envelope.body(
                    [envelope.choice(c.index, "", None, None, part=True, first=True) for c in job.choices], part=True
                )
            )
        async for together in job.parts():
            # In one piece: where steps take less than events do, the texts would be ever farther behind.
            if found := "".join(_events(job, envelope, spelling, together)):
                yield found
        if job.asked.include_usage:
            yield _event(envelope.body([], part=True, usage=usage(job.prompt_tokens, job.new_tokens)))
        yield "data: [DONE]\n\n"
    except Failure as failure:
        yield _event(failure.body)
    finally:
        job.cancel()


def _events(job: Job, envelope: Envelope, spelling: Spelling, together: Sequence[Part]) -> Iterator[str]:
    """An event for each token where more than its text is asked for, else one for each text that grew."""
    if job.asked.top_logprobs_asked is None and not job.asked.details:
        grown: dict[int, str] = {}
        for part in together:
            grown[part.choice.index] = grown.get(part.choice.index, "") + part.text
        for index, text in grown.items():
            end = job.choices[index].end
            if text or end:
                yield _event(envelope.body([envelope.choice(index, text, end, None, part=True)], part=True))
        return
    for part in together:
        choice = part.choice
        places = [part.place] if job.asked.top_logprobs_asked is not None else []
        logprobs = _logprobs(envelope, spelling, choice, places)
        body = envelope.body([envelope.choice(choice.index, part.text, part.end, logprobs, part=True)], part=True)
        if job.asked.details:
            body["skipdecode"] = {
                **envelope.skipdecode,
                "token": part.chosen.token,
                "layers": part.layers,
                "seconds": part.chosen.at - choice.answer.times.submitted,
            }
        yield _event(body)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"  # in ASCII: some clients take U+2028 and U+0085 for ends of lines


def _speed(job: Job) -> dict[str, Any]:
    return {"speedup": job.speedup, "planned_speedup": job.planned}


def _logprobs(envelope: Envelope, spelling: Spelling, choice: Choice, places: Sequence[int]) -> dict[str, Any] | None:
    """Probabilities of the tokens at these places of a text, as each kind of request has them."""
    if not places:
        return None
    first = spelling.first(each.token for each in choice.logprobs)

    def value(place: int, token: int, logprob: float | None) -> dict[str, Any]:
        raw = spelling.raw(token, first=place <= first)
        return {"token": spelling.name(token, raw), "logprob": logprob, "bytes": list(raw)}

    def values(place: int) -> dict[str, Any]:
        chosen = choice.logprobs[place]
        top = [value(place, *pair) for pair in chosen.top]
        return {**value(place, chosen.token, chosen.logprob), "top_logprobs": top}

    found = [values(place) for place in places]
    if envelope.chat:
        return {"content": found, "refusal": None}
    return {
        "tokens": [each["token"] for each in found],
        "token_logprobs": [each["logprob"] for each in found],
        "top_logprobs": [_by_name(each["top_logprobs"]) for each in found],
        "text_offset": [choice.offsets[place] for place in places],
    }


def _by_name(top: Sequence[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in top:
        found.setdefault(each["token"], each["logprob"])  # the likelier of two that have one name comes first
    return found
