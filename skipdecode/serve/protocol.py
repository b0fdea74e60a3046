"""The requests of OpenAI's interface that the server understands, and its answers and errors."""

import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from skipdecode.errors import ConfigError
from skipdecode.request import LEAST_TEMPERATURE

String = Annotated[str, Field(max_length=256)]  # each token is held against every part of one
Strings = Annotated[list[String], Field(max_length=16)]
Tokens = list[Annotated[int, Field(ge=0, strict=True)]]  # true is no token


class Fields(BaseModel):
    """Fields of JSON; a null one is as one that isn't there."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values


class StreamOptions(Fields):
    """Of a stream: whether it ends with the request's usage."""

    include_usage: bool = False
    include_obfuscation: bool = False  # asked for by clients that needn't have it


class Asked(Fields):
    """What the two kinds of requests share. Texts are greedy unless `temperature` or `top_p` is given, and at a
    temperature below 1e-5.
    """

    model: str
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    repetition_penalty: float | None = Field(None, ge=1e-5, le=10)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: String | Strings | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # taken and not used
    # What is no part of OpenAI's: by the client's `extra_body`.
    speedup: float | None = None
    over: Literal["decode", "all"] | None = None
    lossless: bool = False
    details: bool = False  # the layers of each token, and times
    # Known to clients and to nothing here: refused where they ask for something.
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None

    def check(self) -> None:
        """Raise ConfigError for fields that would be without effect beside one another, as OpenAI's API does."""
        if self.stream_options is not None and not self.stream:
            raise ConfigError("stream_options is given without stream: it says what a stream ends with")
        if (self.top_k or 0) > 1 and self.temperature is None and self.top_p is None:
            raise ConfigError(f"top_k is {self.top_k} without temperature or top_p: texts are greedy then")

    @property
    def stops(self) -> list[str]:
        """The texts that end the answer."""
        stops = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        if "" in stops:
            raise ConfigError("stop holds an empty text")
        return stops

    @property
    def new_tokens(self) -> int | None:
        """How many are asked for."""
        return self.max_tokens

    @property
    def top_logprobs_asked(self) -> int | None:
        """Of how many tokens probabilities are asked for at each place; None for none at all."""
        raise NotImplementedError

    @property
    def sampling(self) -> dict[str, Any]:
        """As settings of `generate`."""
        given = self.temperature is not None or self.top_p is not None
        sampled = given and (self.temperature is None or self.temperature >= LEAST_TEMPERATURE) and self.top_p != 0
        found: dict[str, Any] = {"do_sample": sampled}
        if sampled:
            # Those of a checkpoint's generation_config are put back to what says nothing.
            found |= {"temperature": self.temperature or 1.0, "top_p": self.top_p or 1.0, "top_k": self.top_k or 0}
        if self.repetition_penalty is not None:
            found["repetition_penalty"] = self.repetition_penalty
        if self.logit_bias:
            found["sequence_bias"] = {(token,): bias for token, bias in self.logit_bias.items()}
        return found


class CompletionAsked(Asked):
    """POST /v1/completions."""

    prompt: str | Tokens | list[str] | list[Tokens]
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None

    @property
    def top_logprobs_asked(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, each a text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ConfigError("prompt is empty")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class Part(BaseModel):
    """A part of a message: text alone."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[Part]

    def plain(self) -> dict[str, Any]:
        """As a chat template takes it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {**(self.model_extra or {}), "role": self.role, "content": content}


class TextFormat(Fields):
    """The response format that asks for nothing."""

    type: Literal["text"]


class ChatAsked(Asked):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    # As for the penalties above.
    tools: list[Any] | None = Field(None, max_length=0)
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ConfigError(f"top_logprobs is {self.top_logprobs} without logprobs: true")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ConfigError(
                f"max_tokens is {self.max_tokens} beside max_completion_tokens {self.max_completion_tokens}: give one"
            )

    @property
    def new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top_logprobs_asked(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class Failure(Exception):
    """An error of OpenAI's form.

    Args:
        status: of HTTP.
        message, code, param: what is wrong, by what name, and in which field.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.body = error_body(status, message, code, param)


_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Envelope:
    """What all answers to one request, or all parts of a stream, have in common."""

    def __init__(self, asked: Asked, skipdecode: Mapping[str, Any]) -> None:
        self.skipdecode = dict(skipdecode)  # what is no part of OpenAI's answers
        self.chat = isinstance(asked, ChatAsked)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = asked.model

    def body(self, choices: list[dict[str, Any]], *, part: bool = False, **more: Any) -> dict[str, Any]:
        """With its choices."""
        kind = ("chat.completion.chunk" if part else "chat.completion") if self.chat else "text_completion"
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
        self, index: int, text: str, end: str | None, logprobs: Any, *, part: bool = False, first: bool = False
    ) -> dict[str, Any]:
        """One choice, or a part of it."""
        found: dict[str, Any] = {"index": index, "finish_reason": end, "logprobs": logprobs}
        if not self.chat:
            return {**found, "text": text}
        message: dict[str, Any] = {"content": text}
        if first or not part:
            message["role"] = "assistant"
        return {**found, "delta" if part else "message": message}


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """Tokens of a request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }
