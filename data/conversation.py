"""Conversations: reading their messages from rows, and the token ids of a prompt and an answer."""

import json
import reprlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from data.files import Row
from skipdecode.checkpoint.chat_template import chat_ids, render_chat
from skipdecode.errors import ConfigError

ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWER = "assistant"


@dataclass(frozen=True)
class Conversation:
    """The messages of a conversation up to an answer, as a chat template takes them.

    Attributes:
        where: where the answer stands, for error messages.
        messages: the messages; the last one is the answer.
        tools: JSON schemas of the functions that the model may call; None: no tools.
    """

    where: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None

    @classmethod
    def of_json(cls, text: str) -> "Conversation":
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """The conversation as text, which data sets in memory and on disk can hold."""
        return json.dumps(asdict(self), ensure_ascii=False)

    def prompt_ids(self, tokenizer: Any) -> list[int]:
        """The token ids that the server sends to the model for the messages before the answer.

        Raises:
            ConfigError: for a tokenizer without a chat template, and messages that the template refuses.
        """
        return chat_ids(tokenizer, self._text(tokenizer, history=True))

    def answer_ids(self, tokenizer: Any, ends: Collection[int]) -> list[int]:
        """The token ids that the model generates for the answer, up to and including the token that ends generation.

        Args:
            tokenizer: the model's tokenizer.
            ends: the tokens that end generation.

        Raises:
            ConfigError: as `prompt_ids` does; where the rendered conversation doesn't start with the prompt or doesn't
                contain the answer; and where the answer doesn't end generation, or ends it too early.
        """
        prompt, text = self._text(tokenizer, history=True), self._text(tokenizer, history=False)
        if not text.startswith(prompt):
            raise ConfigError(
                f"{self.where}: the chat template changes the messages before this answer, or adds text to the prompt "
                f"which the answer's own rendering lacks: the prompt ends in {prompt[-40:]!r}, and with the answer the "
                f"text ends in {text[-40:]!r}; use a template whose prompt is the start of the conversation with the "
                "answer"
            )
        rest = text[len(prompt) :]
        content = str(self.messages[-1]["content"])
        if _letters(content) not in _letters(rest):
            raise ConfigError(
                f"{self.where}: the chat template drops or changes a part of the answer: {reprlib.repr(content)} "
                f"becomes {reprlib.repr(rest)}; use a template that keeps it, or remove that part from the answer"
            )
        ids = _continuation(tokenizer, prompt, rest)
        end = next((n for n, token in enumerate(ids) if token in ends), None) if ids is not None else None
        ending = [str(token) for token in tokenizer.convert_ids_to_tokens(sorted(ends))]
        names = ", ".join(ending)
        if ids is None:
            raise ConfigError(
                f"{self.where}: the tokenizer joins the end of the prompt ({prompt[-10:]!r}) and the start of the "
                f"answer ({rest[:10]!r}) into one token; change the start of the answer"
            )
        if end is None:
            raise ConfigError(
                f"{self.where}: the chat template ends the answer with {rest[-20:]!r}, which has no token that ends "
                f"generation ({names}): add the one that the template writes to eos_token_id in the model's "
                "generation_config.json"
            )
        early = tokenizer.decode(ids[end + 1 :], skip_special_tokens=True).strip()
        if early or any(token in content for token in ending):
            raise ConfigError(
                f"{self.where} contains a token that ends generation ({names}) before its end: decoding would stop "
                "there; remove it from the text"
            )
        return ids[: end + 1]

    def _text(self, tokenizer: Any, *, history: bool) -> str:
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"{self.where}: the tokenizer has no chat template, which renders conversations: use a model that was "
                "trained for chats, or a tokenizer with a template (model.tokenizer)"
            )
        messages = self.messages[:-1] if history else self.messages
        try:
            return render_chat(tokenizer, messages, tools=self.tools, generation_prompt=history)
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from error


def _continuation(tokenizer: Any, prompt: str, rest: str) -> list[int] | None:
    """The tokens of `rest` after the tokens of `prompt`; None where the tokenizer can't separate them.

    They are the tokens that the server sees once the answer is part of a longer conversation. Where one of those would
    span the end of the prompt, `rest` is tokenised alone, because generation starts after the whole prompt.
    """
    before, together = chat_ids(tokenizer, prompt), chat_ids(tokenizer, prompt + rest)
    if together[: len(before)] == before:
        return together[len(before) :]
    alone = chat_ids(tokenizer, rest)
    # Some tokenizers put a space before a text, which would be part of the answer then.
    one, other = (tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (before + alone, together))
    return alone if one == other else None


def _letters(text: str) -> str:
    """The text without whitespace, which many templates strip or normalise."""
    return "".join(text.split())


def conversations(row: Row, *, last: bool) -> list[Conversation]:
    """The answers of a row, each with the messages before it.

    Args:
        row: a row with `messages`, or with `prompt` and `completion`, each a list of messages, and optionally `tools`.
            With `completion`, the answers in it count.
        last: whether only the last answer counts.

    Raises:
        ConfigError: for a row without messages or without an answer at their end, and for an invalid message.
    """
    fields = ("messages",) if row.values.get("messages") is not None else ("prompt", "completion")
    missing = [field for field in fields if row.values.get(field) is None]
    if missing:
        has = ", ".join(map(str, row.values))
        raise ConfigError(f"{row.where}: no messages: expected messages, or prompt and completion, and it has {has}")
    parts = [(f"{row.where}: {field}", _messages(row, field)) for field in fields]
    named = [(f"{field}.{n}", message) for field, messages in parts for n, message in enumerate(messages)]
    where, end = named[-1]
    if end["role"] != ANSWER:
        raise ConfigError(f"{where}.role is {end['role']!r}: the last message must be an answer (role {ANSWER!r})")
    given = 0 if len(parts) == 1 else len(parts[0][1])  # messages that are no answers to train on
    answers = [n for n, (_, message) in enumerate(named) if message["role"] == ANSWER and n >= given]
    tools = _tools(row)
    found = []
    for n in answers[-1:] if last else answers:
        where, answer = named[n]
        if n == 0:
            raise ConfigError(
                f"{where} is an answer without a message before it: remove it, or train on the last answers only "
                "(data.options.answers=last)"
            )
        if not answer["content"].strip() and not answer.get("tool_calls"):
            raise ConfigError(f"{where}.content is {answer['content']!r}: an answer must not be empty or blank")
        found.append(Conversation(where, [message for _, message in named[: n + 1]], tools))
    return found


def _messages(row: Row, field: str) -> list[dict[str, Any]]:
    messages = row.values[field]
    if not isinstance(messages, list) or not messages:
        raise ConfigError(
            f"{row.where}: {field} is {reprlib.repr(messages)}: it must be a list of messages, each with role and "
            "content; for plain text use the task text"
        )
    return [_message(f"{row.where}: {field}.{n}", message) for n, message in enumerate(messages)]


def _message(where: str, given: Any) -> dict[str, Any]:
    """A message in the form that the server gives to chat templates."""
    if not isinstance(given, dict):
        raise ConfigError(f"{where} is {reprlib.repr(given)}: it must be an object with role and content")
    message = {name: value for name, value in given.items() if value is not None}
    if (role := message.get("role")) not in ROLES:
        raise ConfigError(f"{where}.role is {reprlib.repr(role)}: it must be one of {', '.join(ROLES)}")
    calls, content = message.pop("tool_calls", []), message.pop("content", None)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ConfigError(f"{where}.tool_calls is {reprlib.repr(calls)}: it must be a list of objects")
    if content is None and not (role == ANSWER and calls):
        raise ConfigError(f"{where}.content is missing")
    # Templates that write objects as JSON keep the order of keys, which is the server's here.
    message |= {"role": message.pop("role"), "content": "" if content is None else _text(f"{where}.content", content)}
    if calls:  # some templates test for the key
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConfigError(f"{where} is {reprlib.repr(content)}: it must be text, or a list of parts of type text")
    for n, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ConfigError(
                f"{where}.{n} is {reprlib.repr(part)}: it must be text, as in {{'type': 'text', 'text': 'Hello'}}; "
                "images and sounds can't be trained on"
            )
    return "".join(part["text"] for part in content)


def _call(given: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object, as chat templates take them."""
    call = {name: value for name, value in given.items() if value is not None}
    function = call.pop("function", None)
    if not isinstance(function, dict):
        return call
    function = {name: function[name] for name in ("name", "arguments", *function) if function.get(name) is not None}
    if isinstance(function.get("arguments"), str):
        with suppress(ValueError, RecursionError):  # a model may have written invalid JSON, which stays
            parsed = json.loads(function["arguments"])
            function["arguments"] = parsed if isinstance(parsed, dict) else function["arguments"]
    return {"function": function, **call}


def _tools(row: Row) -> list[dict[str, Any]] | None:
    given = tools = row.values.get("tools")
    if isinstance(given, str):
        try:
            tools = json.loads(given)
        except (ValueError, RecursionError):
            tools = given
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ConfigError(
            f"{row.where}: tools is {reprlib.repr(given)}: it must be a list of JSON schemas, or one as JSON text"
        )
    return tools or None
