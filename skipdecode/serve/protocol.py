"""The requests of OpenAI's interface that the server understands, and its answers and errors."""

import json
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    StrictBool,
    StrictFloat,
    field_validator,
    model_validator,
)

from skipdecode.engine.sequence import LEAST_TEMPERATURE
from skipdecode.errors import ConfigError
from skipdecode.serve.field_errors import shown, unknown_field
from skipdecode.serve.ignored_fields import NEUTRAL, UNUSED, is_neutral

_LONGEST_STOP, _MOST_STOPS = 256, 16  # each token is held against every part of one


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value  # in JSON 5.0 is 5


Integer = Annotated[int, Strict(), BeforeValidator(_whole)]  # "5" and true are none


class Fields(BaseModel):
    """Fields of JSON; a null one is as one that isn't there."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values


class StreamOptions(Fields):
    """Of a stream: whether it ends with the request's usage."""

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False  # asked for by clients that needn't have it
    continuous_usage_stats: Literal[False] = False  # vLLM's


class Asked(Fields):
    """What the two kinds of requests share. Texts are greedy unless `temperature` or `top_p` is given, and at a
    temperature below 1e-5.
    """

    address: ClassVar[str]
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL

    model: str
    n: Integer = Field(1, ge=1, le=128)
    max_tokens: Integer | None = Field(None, ge=1)
    temperature: StrictFloat | None = Field(None, ge=0, le=2)
    top_p: StrictFloat | None = Field(None, ge=0, le=1)
    top_k: Integer | None = Field(None, ge=-1)  # 0 and vLLM's -1: all tokens
    repetition_penalty: StrictFloat | None = Field(None, ge=1e-5, le=10)
    logit_bias: dict[int, Annotated[StrictFloat, Field(ge=-100, le=100)]] | None = None
    seed: Integer | None = Field(None, ge=-(2**63), lt=2**63)
    stop: list[str] = []
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    # What is no part of OpenAI's: by the client's `extra_body`.
    speedup: StrictFloat | None = None
    over: Literal["decode", "all"] | None = None
    lossless: StrictBool = False
    details: StrictBool = False  # the layers of each token, and times

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: Any) -> Any:
        """Without the fields that ask for nothing. Raises Failure for others that this server can't have."""
        if not isinstance(values, dict):
            return values
        found = {}
        for name, value in values.items():
            if value is None:
                continue
            if name in cls.model_fields:
                found[name] = value
            elif name in UNUSED:
                if not isinstance(value, UNUSED[name]):
                    wanted = "a string" if UNUSED[name] is str else "an object"
                    raise Failure(400, f"{name} is {shown(value)}: it must be {wanted}", "invalid_value", name)
            elif name in cls.neutral:
                if not is_neutral(value, cls.neutral[name]):
                    message = f"{name} is {shown(value)}: this server doesn't support it"
                    if cls.neutral[name]:
                        allowed = " and ".join(map(shown, cls.neutral[name]))
                        message += f", and accepts only {allowed}, which asks for nothing"
                    raise Failure(400, message, "unsupported_value", name)
            else:
                known = [*cls.model_fields, *cls.neutral, *UNUSED]
                elsewhere = {each.address: each.model_fields for each in Asked.__subclasses__()}
                raise Failure(400, unknown_field(name, known, elsewhere), "unknown_parameter", name)
        return found

    @field_validator("stop", mode="plain")
    @classmethod
    def _stops(cls, value: Any) -> list[str]:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list):
            raise ConfigError(f"it is {shown(value)}, and must be a string or a list of strings")
        if len(stops) > _MOST_STOPS:
            raise ConfigError(f"it has {len(stops)} entries, and may have {_MOST_STOPS}")
        for stop in stops:
            if not isinstance(stop, str):
                raise ConfigError(f"an entry is {shown(stop)}, and must be a string")
            if not 1 <= len(stop) <= _LONGEST_STOP:
                raise ConfigError(f"a string has {len(stop)} characters, and must have 1 to {_LONGEST_STOP}")
        return stops

    def check(self) -> None:
        """Raise ConfigError for fields that would be without effect beside one another, as OpenAI's API does."""
        if self.include_usage and not self.stream:
            raise ConfigError("stream_options is given without stream: it says what a stream ends with")
        if (self.top_k or 0) > 1 and self.temperature is None and self.top_p is None:
            raise ConfigError(f"top_k is {self.top_k} without temperature or top_p: texts are greedy then")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the request's usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def new_tokens(self) -> int | None:
        """How many are asked for."""
        return self.max_tokens

    @property
    def length_field(self) -> str:
        """The field that says so."""
        return "max_tokens"

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
            top_k = max(0, self.top_k or 0)
            found |= {"temperature": self.temperature or 1.0, "top_p": self.top_p or 1.0, "top_k": top_k}
        if self.repetition_penalty is not None:
            found["repetition_penalty"] = self.repetition_penalty
        if self.logit_bias:
            found["sequence_bias"] = {(token,): bias for token, bias in self.logit_bias.items()}
        return found


class CompletionAsked(Asked):
    """POST /v1/completions."""

    address = "/v1/completions"
    neutral = {**NEUTRAL, "add_special_tokens": (True,)}

    prompt: list[str | list[int]]  # one or several, each a text or tokens
    logprobs: Integer | None = Field(None, ge=0, le=20)
    best_of: Integer | None = None

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompts(cls, value: Any) -> list[str | list[int]]:
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list):
            raise ConfigError(f"it is {shown(value)}, and must be {_A_PROMPT}")
        if not value:
            raise ConfigError("it is empty")
        first, kind = shown(value[0]), type(value[0])
        for n, each in enumerate(value):
            if type(each) is not kind:
                raise ConfigError(f"entry {n} is {shown(each)} beside {first} in entry 0, and it must be {_A_PROMPT}")
        if kind is str:
            return value
        if kind is list:
            return [_tokens(each, f"entry {n}, ") for n, each in enumerate(value)]
        if kind is int:
            return [_tokens(value)]
        raise ConfigError(f"entry 0 is {first}, and it must be {_A_PROMPT}")

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, 1, self.n):
            raise ConfigError(f"best_of is {self.best_of}: this server chooses among no texts; leave it out")

    @property
    def top_logprobs_asked(self) -> int | None:
        return self.logprobs


_A_PROMPT = "a string, a list of strings, a list of token ids, or a list of such lists"


def _tokens(values: list[Any], where: str = "") -> list[int]:
    for place, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:  # true is no token
            raise ConfigError(f"{where}entry {place} is {shown(value)}, and a token id is an integer of at least 0")
    return values


class Part(BaseModel):
    """A part of a message: text alone, be it a refusal of the assistant's."""

    type: str
    text: str

    @model_validator(mode="before")
    @classmethod
    def _text(cls, values: Any) -> Any:
        kind = values.get("type") if isinstance(values, dict) else None
        if kind == "refusal":
            return {"type": kind, "text": values.get("refusal")}
        if isinstance(kind, str) and kind != "text":
            raise ConfigError(f"its type is {shown(kind)}, and the model reads parts of type text alone")
        return values


class Function(Fields):
    """The function that an assistant called."""

    model_config = ConfigDict(extra="allow")
    name: str
    arguments: dict[str, Any] | str = ""

    @field_validator("arguments", mode="plain")
    @classmethod
    def _as_an_object(cls, value: Any) -> dict[str, Any] | str:
        """Chat templates take an object where requests have its JSON, which a model may have written wrong."""
        if not isinstance(value, str | dict):
            raise ConfigError(f"it is {shown(value)}, and must be a string")
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            return value
        return found if isinstance(found, dict) else value


class ToolCall(Fields):
    """One of the calls that an assistant made."""

    model_config = ConfigDict(extra="allow")
    function: Function | None = None


class Message(Fields):
    """A message of a chat. Its role, and what else it has, are the chat template's concern."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: list[Part]
    tool_calls: list[ToolCall] = []
    audio: None = None

    @model_validator(mode="before")
    @classmethod
    def _with_content(cls, values: Any) -> Any:
        """An assistant that called a tool, or refused, may have said nothing else; so may a function."""
        if not isinstance(values, dict) or values.get("content") is not None:
            return values
        said = ("tool_calls", "function_call", "refusal") if values.get("role") == "assistant" else ()
        if values.get("role") == "function" or any(values.get(name) for name in said):
            return {**values, "content": values.get("refusal") or ""}
        return values

    @field_validator("content", mode="before")
    @classmethod
    def _as_parts(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        if not isinstance(value, list):
            raise ConfigError(f"it is {shown(value)}, and must be a string or a list of parts")
        return value

    def plain(self) -> dict[str, Any]:
        """As a chat template takes it. Some templates ask only whether there are tool_calls: none stay out."""
        content = "".join(part.text for part in self.content)
        found: dict[str, Any] = {**(self.model_extra or {}), "role": self.role, "content": content}
        if self.tool_calls:
            found["tool_calls"] = [call.model_dump(exclude_unset=True) for call in self.tool_calls]
        return found


class ChatAsked(Asked):
    """POST /v1/chat/completions."""

    address = "/v1/chat/completions"
    neutral = {**NEUTRAL, "add_special_tokens": (False,), "best_of": (1,)}

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Integer | None = Field(None, ge=1)
    logprobs: StrictBool = False
    top_logprobs: Integer | None = Field(None, ge=0, le=20)

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
    def length_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

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
    """An error as OpenAI's clients read it, on one line. What it repeats of a request may be halves of surrogates."""
    message, param = _printable(message), None if param is None else _printable(param)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _printable(text: str) -> str:
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)


class Envelope:
    """What all answers to one request, or all parts of a stream, have in common."""

    def __init__(self, asked: Asked, skipdecode: Mapping[str, Any]) -> None:
        self.skipdecode = dict(skipdecode)  # what is no part of OpenAI's answers
        self.chat = isinstance(asked, ChatAsked)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = asked.model
        self.include_usage = asked.include_usage

    def body(self, choices: list[dict[str, Any]], *, part: bool = False, **more: Any) -> dict[str, Any]:
        """With its choices."""
        kind = ("chat.completion.chunk" if part else "chat.completion") if self.chat else "text_completion"
        if part and self.include_usage:
            more = {"usage": None, **more}  # all parts have the field, and the last one its figures
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
