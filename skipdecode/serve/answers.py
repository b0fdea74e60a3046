"""The answers to a request, in one piece or as a stream of server-sent events."""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from skipdecode.request import Chosen
from skipdecode.serve.job import Choice, Job, Part
from skipdecode.serve.protocol import Envelope, Failure, usage


async def whole(job: Job, tokenizer: Any) -> dict[str, Any]:
    """The answer in one piece, once every text has ended. Raises Failure."""
    envelope = Envelope(job.asked)
    async for _ in job.parts():
        pass
    choices = [
        envelope.choice(
            choice.index, choice.words.text, choice.end, _logprobs(envelope, tokenizer, choice, choice.logprobs, 0)
        )
        for choice in job.choices
    ]
    body = envelope.body(choices, usage=usage(job.prompt_tokens, job.new_tokens))
    return {**body, "skipdecode": _details(job)} if job.asked.details else body


async def events(job: Job, tokenizer: Any) -> AsyncIterator[str]:
    """The answer as it comes. What goes wrong is an event, too: the status has been sent."""
    envelope = Envelope(job.asked)
    try:
        if envelope.chat:
            yield _event(
                envelope.body(
                    [envelope.choice(c.index, "", None, None, part=True, first=True) for c in job.choices], part=True
                )
            )
        async for together in job.parts():
            # In one piece: where steps take less than events do, the texts would be ever farther behind.
            if found := "".join(_events(job, envelope, tokenizer, together)):
                yield found
        if job.asked.stream_options is not None and job.asked.stream_options.include_usage:
            yield _event(envelope.body([], part=True, usage=usage(job.prompt_tokens, job.new_tokens)))
        yield "data: [DONE]\n\n"
    except Failure as failure:
        yield _event(failure.body)
    finally:
        job.cancel()


def _events(job: Job, envelope: Envelope, tokenizer: Any, together: Sequence[Part]) -> Iterator[str]:
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
        new = [part.chosen] if job.asked.top_logprobs_asked is not None else []
        logprobs = _logprobs(envelope, tokenizer, choice, new, part.offset)
        body = envelope.body([envelope.choice(choice.index, part.text, part.end, logprobs, part=True)], part=True)
        if job.asked.details:
            body["skipdecode"] = {
                "token": part.chosen.token,
                "layers": part.layers,
                "seconds": part.chosen.at - choice.answer.times.submitted,
            }
        yield _event(body)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _details(job: Job) -> dict[str, Any]:
    return {"speedup": job.speedup, "layers_per_token": job.layers_per_token}


def _logprobs(
    envelope: Envelope, tokenizer: Any, choice: Choice, tokens: Sequence[Chosen], offset: int
) -> dict[str, Any] | None:
    """Probabilities of tokens, the first of which starts at this character, as each kind of request has them."""
    if not tokens:
        return None

    def name(token: int) -> str:
        text: str = tokenizer.decode([token])
        if "\ufffd" in text:  # a part of a character, which others' parts would look like
            text = tokenizer.convert_ids_to_tokens(token)
        return text

    def value(token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": name(token), "logprob": logprob, "bytes": list(name(token).encode())}

    if envelope.chat:
        content = [
            {**value(each.token, each.logprob), "top_logprobs": [value(*pair) for pair in each.top]} for each in tokens
        ]
        return {"content": content, "refusal": None}
    names = [name(each.token) for each in tokens]
    offsets = [offset + sum(map(len, names[:n])) for n in range(len(names))]
    return {
        "tokens": names,
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [{name(token): logprob for token, logprob in each.top} for each in tokens],
        "text_offset": offsets,
    }
