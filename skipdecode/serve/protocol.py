"""The requests and errors of OpenAI's API, as far as the server implements them."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictFloat, field_validator, model_validator

from skipdecode.engine.prepare import MIN_TEMPERATURE
from skipdecode.errors import ConfigError
from skipdecode.serve.field_errors import show_value, unknown_field
from skipdecode.serve.ignored_fields import NEUTRAL, UNUSED, is_neutral
from skipdecode.serve.request_fields import Integer, JSONObject, Message, ResponseFormat, StreamOptions, Tool

_MAX_STOP_LENGTH, _MAX_STOPS = 256, 16  # every new token is compared with all stops


class BaseRequest(JSONObject):
    """What both kinds of requests have in common. Decoding is greedy unless `temperature` or `top_p` is given, and if
    the temperature is below 1e-5.
    """

    endpoint: ClassVar[str]
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL

    model: str
    n: Integer = Field(1, ge=1, le=128)
    max_tokens: Integer | None = Field(None, ge=1)
    temperature: StrictFloat | None = Field(None, ge=0, le=2)
    top_p: StrictFloat | None = Field(None, ge=0, le=1)
    top_k: Integer | None = Field(None, ge=-1)  # 0, and -1 as in vLLM: all tokens
    repetition_penalty: StrictFloat | None = Field(None, ge=1e-5, le=10)
    presence_penalty: StrictFloat = Field(0.0, ge=-2, le=2)
    frequency_penalty: StrictFloat = Field(0.0, ge=-2, le=2)
    logit_bias: dict[int, Annotated[StrictFloat, Field(ge=-100, le=100)]] | None = None
    seed: Integer | None = Field(None, ge=-(2**63), lt=2**63)
    stop: list[str] = Field(default_factory=list)
    response_format: ResponseFormat = ResponseFormat(type="text")
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    # Not in OpenAI's API; sent by `extra_body` of its client.
    speedup: StrictFloat | None = None
    over: Literal["decode", "all"] | None = None
    lossless: StrictBool = False
    details: StrictBool = False  # whether the response has layers and times

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: Any) -> Any:
        """Remove unsupported fields whose values have no effect. Raises APIError for other unsupported fields."""
        if not isinstance(values, dict):
            return values
        supported = {}
        for name, value in values.items():
            if value is None:
                continue
            if name in cls.model_fields:
                supported[name] = value
            elif name in UNUSED:
                if not isinstance(value, UNUSED[name]):
                    expected = "a string" if UNUSED[name] is str else "an object"
                    raise APIError(400, f"{name} is {show_value(value)}: it must be {expected}", "invalid_value", name)
            elif name in cls.neutral:
                if not is_neutral(value, cls.neutral[name]):
                    message = f"{name} is {show_value(value)}: this server doesn't support it"
                    if cls.neutral[name]:
                        allowed = " and ".join(map(show_value, cls.neutral[name]))
                        message += f", and accepts only {allowed}, which has no effect"
                    raise APIError(400, message, "unsupported_value", name)
            else:
                known = [*cls.model_fields, *cls.neutral, *UNUSED]
                endpoints = {kind.endpoint: kind.model_fields for kind in BaseRequest.__subclasses__()}
                raise APIError(400, unknown_field(name, known, endpoints), "unknown_parameter", name)
        return supported

    @field_validator("stop", mode="plain")
    @classmethod
    def _stops(cls, value: Any) -> list[str]:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list):
            raise ConfigError(f"it is {show_value(value)}, and must be a string or a list of strings")
        if len(stops) > _MAX_STOPS:
            raise ConfigError(f"it has {len(stops)} entries: the maximum is {_MAX_STOPS}")
        for stop in stops:
            if not isinstance(stop, str):
                raise ConfigError(f"an entry is {show_value(stop)}, and must be a string")
            if not 1 <= len(stop) <= _MAX_STOP_LENGTH:
                raise ConfigError(f"a string has {len(stop)} characters, and must have 1 to {_MAX_STOP_LENGTH}")
        return stops

    def check(self) -> None:
        """Raise ConfigError for fields that have no effect in this combination, as OpenAI's API does."""
        if self.include_usage and not self.stream:
            raise ConfigError("stream_options is given without stream: true, and has no effect then")
        if (self.top_k or 0) > 1 and self.temperature is None and self.top_p is None:
            raise ConfigError(
                f"top_k is {self.top_k} without temperature or top_p: it has no effect in greedy decoding"
            )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the request's usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def new_tokens(self) -> int | None:
        """The maximum number of new tokens, if the request sets one."""
        return self.max_tokens

    @property
    def length_field(self) -> str:
        """The name of the field that sets `new_tokens`."""
        return "max_tokens"

    @property
    def logprobs_count(self) -> int | None:
        """How many of the likeliest tokens to report with each token; None for no log probabilities at all."""
        raise NotImplementedError

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling and logits processors as settings of `generate`."""
        given = self.temperature is not None or self.top_p is not None
        sampled = given and (self.temperature is None or self.temperature >= MIN_TEMPERATURE) and self.top_p != 0
        settings: dict[str, Any] = {"do_sample": sampled}
        if sampled:
            # All three are set, so that the checkpoint's generation_config has no effect on them.
            top_k = max(0, self.top_k or 0)
            settings |= {"temperature": self.temperature or 1.0, "top_p": self.top_p or 1.0, "top_k": top_k}
        if self.repetition_penalty is not None:
            settings["repetition_penalty"] = self.repetition_penalty
        if self.logit_bias:
            settings["sequence_bias"] = {(token,): bias for token, bias in self.logit_bias.items()}
        return settings


class CompletionRequest(BaseRequest):
    """The body of POST /v1/completions."""

    endpoint = "/v1/completions"
    neutral: ClassVar = {
        **NEUTRAL,
        "add_special_tokens": (True,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
    }

    prompt: list[str | list[int]]  # one or several, each a string or token ids
    max_tokens: Integer | None = Field(None, ge=0)
    logprobs: Integer | None = Field(None, ge=0, le=20)
    best_of: Integer | None = None
    echo: StrictBool = False  # whether the prompt stands before its output, with log probabilities of its own

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompts(cls, value: Any) -> list[str | list[int]]:
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list):
            raise ConfigError(f"it is {show_value(value)}, and must be {_A_PROMPT}")
        if not value:
            raise ConfigError("it is empty")
        first, kind = show_value(value[0]), type(value[0])
        for n, each in enumerate(value):
            if type(each) is not kind:
                raise ConfigError(f"entry {n} is {show_value(each)}, but entry 0 is {first}: it must be {_A_PROMPT}")
        if kind is str:
            return value
        if kind is list:
            return [_token_ids(each, f"entry {n}, ") for n, each in enumerate(value)]
        if kind is int:
            return [_token_ids(value)]
        raise ConfigError(f"entry 0 is {first}: it must be {_A_PROMPT}")

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.n):
            raise ConfigError(
                f"best_of is {self.best_of} and n is {self.n}: every sequence that is decoded is returned, so they "
                "must be equal; leave best_of out"
            )
        if self.max_tokens == 0 and not self.echo:
            raise ConfigError("max_tokens is 0: it must be greater than or equal to 1, unless echo is true")

    @property
    def logprobs_count(self) -> int | None:
        return self.logprobs


_A_PROMPT = "a string, a list of strings, a list of token ids, or a list of such lists"


def _token_ids(values: list[Any], where: str = "") -> list[int]:
    for place, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(
                f"{where}entry {place} is {show_value(value)}, and a token id is an integer of at least 0"
            )
    return values


class ChatRequest(BaseRequest):
    """The body of POST /v1/chat/completions."""

    endpoint = "/v1/chat/completions"
    neutral: ClassVar = {**NEUTRAL, "add_special_tokens": (False,), "best_of": (1,)}

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Integer | None = Field(None, ge=1)
    logprobs: StrictBool = False
    top_logprobs: Integer | None = Field(None, ge=0, le=20)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: StrictBool = True

    def check(self) -> None:
        super().check()
        if self.callable_tools and self.response_format.type != "text":
            raise ConfigError(
                f"response_format is {self.response_format.type} beside tools: calls would not be possible"
            )
        if self.top_logprobs and not self.logprobs:
            raise ConfigError(f"top_logprobs is {self.top_logprobs} without logprobs: true")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ConfigError(
                f"max_tokens is {self.max_tokens}, and max_completion_tokens is {self.max_completion_tokens}: give one"
            )

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call, for a chat template."""
        return [] if self.tool_choice == "none" else [tool.model_dump(exclude_unset=True) for tool in self.tools]

    @property
    def new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def length_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def logprobs_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class APIError(Exception):
    """An error response in OpenAI's form: `code` names its kind, and `param` the wrong field, if there is one."""

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
    """The body of an error response. Control characters and lone surrogates from the request are escaped."""
    message, param = _printable(message), None if param is None else _printable(param)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _printable(text: str) -> str:
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)
