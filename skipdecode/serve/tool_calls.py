"""Tool calls in the text of a model: JSON between <tool_call> and </tool_call>, the form of Hermes and Qwen."""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from skipdecode.errors import ConfigError

_START, _END = "<tool_call>", "</tool_call>"
# What the end of a text may still become: the beginning of a call, and the whitespace before it.
_UNDECIDED = re.compile(r"\s*" + "".join(f"(?:{re.escape(mark)}" for mark in _START) + ")?" * len(_START) + r"$")


def check_tool_template(tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError unless the chat template has calls written in the form that `ToolCallParser` reads."""
    try:
        template = str(tokenizer.get_chat_template(tools=list(tools)))
    except ValueError:  # there are several templates, none of which is a default
        template = ""
    if "tools" not in template or _START not in template or _START in tokenizer.all_special_tokens:
        raise ConfigError(
            f"tools are given: this checkpoint's chat template has none, or none whose calls stand in {_START} as JSON"
        )


class ToolCallParser:
    """Separates the tool calls of one sequence from its text, as it is generated.

    A call that isn't valid JSON stays in the text. Whitespace around calls is dropped.

    Args:
        single: whether to keep the first call only.

    Attributes:
        content: the text so far, without calls.
        calls: the calls so far, in OpenAI's form.
    """

    def __init__(self, *, single: bool) -> None:
        self._single = single
        self._held = ""  # text that may belong to a call
        self.content = ""
        self.calls: list[dict[str, Any]] = []

    def add(self, text: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Add new text, possibly the `last`. Returns the new content and the new calls."""
        self._held += text
        content, calls = "", len(self.calls)
        while (start := self._held.find(_START)) >= 0:
            end = self._held.find(_END, start)
            if end < 0 and not last:
                before = self._held[:start].rstrip()
                content += self._take(before)
                self._held = self._held[len(before) :]
                break
            end = len(self._held) if end < 0 else end
            found = _parsed(self._held[start + len(_START) : end])
            stop = end + len(_END)
            content += self._take(self._held[:start].rstrip() if found else self._held[:stop])
            self.calls += found[: 1 - len(self.calls)] if self._single else found
            self._held = self._held[stop:]
        else:
            at = len(self._held) if last else _UNDECIDED.search(self._held).start()  # type: ignore[union-attr]
            content += self._take(self._held[:at])
            self._held = self._held[at:]
        return content, self.calls[calls:]

    def _take(self, text: str) -> str:
        """The text, without the whitespace between calls."""
        text = text if text.strip() or not self.calls else ""
        self.content += text
        return text


def _parsed(text: str) -> list[dict[str, Any]]:
    """The calls in the text between the tags, which is one call or a list of calls; none if it is something else."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return []
    found = parsed if isinstance(parsed, list) else [parsed]
    calls = []
    for each in found:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            return []
        arguments = each.get("arguments", each.get("parameters", {}))
        function = {
            "name": each["name"],
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
        }
        calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
    return calls
