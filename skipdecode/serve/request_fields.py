"""The objects that OpenAI's requests are made of: messages, tools, and the form of an answer."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, StrictBool, field_validator, model_validator

from skipdecode.errors import ConfigError
from skipdecode.serve.field_errors import show_value


def _as_integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value  # 5.0 is an integer in JSON


Integer = Annotated[int, Strict(), BeforeValidator(_as_integer)]  # "5" and true are not integers


class JSONObject(BaseModel):
    """A JSON object; a field that is null counts as absent."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values


class StreamOptions(JSONObject):
    """Options of a stream."""

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False  # accepted without effect
    continuous_usage_stats: Literal[False] = False  # vLLM's


class JSONSchema(JSONObject):
    """The schema of an answer; without one, the answer is any JSON object. It is enforced whatever `strict` says."""

    model_config = ConfigDict(extra="forbid", serialize_by_alias=True)
    name: str
    description: str = ""
    strict: StrictBool = True
    fields: dict[str, Any] = Field({"type": "object"}, alias="schema")


class ResponseFormat(JSONObject):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ConfigError(f"its type is {self.type}: json_schema belongs to the type json_schema, which needs it")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The schema of the answer's JSON; None for text."""
        if self.type == "text":
            return None
        return self.json_schema.fields if self.json_schema is not None else {"type": "object"}


class ContentPart(BaseModel):
    """A part of a message's content: text, or a refusal of the assistant, which is text too."""

    type: str
    text: str

    @model_validator(mode="before")
    @classmethod
    def _text(cls, values: Any) -> Any:
        kind = values.get("type") if isinstance(values, dict) else None
        if kind == "refusal":
            return {"type": kind, "text": values.get("refusal")}
        if isinstance(kind, str) and kind != "text":
            raise ConfigError(f"its type is {show_value(kind)}: the only supported type is text")
        return values


class Function(JSONObject):
    """The function of a tool call."""

    model_config = ConfigDict(extra="allow")
    name: str
    arguments: dict[str, Any] | str = ""

    @field_validator("arguments", mode="plain")
    @classmethod
    def _as_an_object(cls, value: Any) -> dict[str, Any] | str:
        """Parse the arguments, as chat templates take an object. A model may have written invalid JSON, which stays."""
        if not isinstance(value, str | dict):
            raise ConfigError(f"it is {show_value(value)}, and must be a string")
        try:
            parsed = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            return value
        return parsed if isinstance(parsed, dict) else value


class ToolCall(JSONObject):
    """A tool call in an assistant's message."""

    model_config = ConfigDict(extra="allow")
    function: Function | None = None


# In a message of an assistant. Clients send the reasoning of earlier turns back, under vLLM's name or DeepSeek's.
_INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "refusal", "reasoning", "reasoning_content")


class Message(JSONObject):
    """A message of a chat. The chat template interprets its role and any other fields."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: list[ContentPart]
    tool_calls: list[ToolCall] = []
    audio: None = None

    @model_validator(mode="before")
    @classmethod
    def _with_content(cls, values: Any) -> Any:
        """Allow messages without content for a function, and for an assistant that sent something else instead."""
        if not isinstance(values, dict) or values.get("content") is not None:
            return values
        allowed = _INSTEAD_OF_CONTENT if values.get("role") == "assistant" else ()
        if values.get("role") == "function" or any(values.get(name) for name in allowed):
            return {**values, "content": values.get("refusal") or ""}
        return values

    @field_validator("content", mode="before")
    @classmethod
    def _as_parts(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        if not isinstance(value, list):
            raise ConfigError(f"it is {show_value(value)}, and must be a string or a list of parts")
        return value

    def plain(self) -> dict[str, Any]:
        """The message for a chat template. Empty tool_calls are left out, as some templates test for the key."""
        content = "".join(part.text for part in self.content)
        message: dict[str, Any] = {**(self.model_extra or {}), "role": self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump(exclude_unset=True) for call in self.tool_calls]
        return message


class ToolFunction(JSONObject):
    """What a model is told of a function that it may call."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = {}


class Tool(JSONObject):
    """A tool; of OpenAI's types of tools only functions are supported."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: ToolFunction
