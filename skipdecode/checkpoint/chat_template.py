"""Conversations as a tokenizer's chat template renders them; the server and training share this code."""

from collections.abc import Mapping, Sequence
from typing import Any

from skipdecode.errors import ConfigError, first_line


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    generation_prompt: bool = True,
) -> str:
    """The text of a conversation.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the messages, each with a role and its content as text.
        tools: JSON schemas of functions that the model may call; None: no tools.
        generation_prompt: whether the start of the next answer is added.

    Raises:
        ConfigError: where the template refuses the messages.
    """
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        )
    except Exception as error:  # chat templates are programs: they can raise anything
        raise ConfigError(f"the chat template refuses these messages: {first_line(error)}") from error


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a rendered conversation. None are added, as templates write all special tokens themselves."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
