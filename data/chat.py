"""The task for conversations: each answer of the assistant is learnt behind the messages before it."""

import json
from collections.abc import Iterator
from typing import ClassVar, Literal

from data.conversation import Conversation, conversations
from data.files import Row
from data.source import TextToText
from data.task import Example
from skipdecode.errors import ConfigError


class Chat(TextToText):
    """The task `chat`: conversations from JSON or Parquet files, rendered by the tokenizer's own chat template.

    A prompt is what the server sends to the model for the same messages.

    Args:
        path: a folder with a file for each split, as in `TextToText`; required. A row has `messages`, each with `role`
            and `content`, or `prompt` and `completion`, each a list of messages; `tools` is passed to the template.
        answers: "all" makes an example of every answer; "last" of the last answer of each row.
        answer_after: text before an answer's result, such as "####": the share of correct results is then scored. None:
            answers have no result that can be compared.
        holdout: number of rows held out of the training file for each split without a file.
        encoding: encoding of text files, by Python's name.
    """

    name: ClassVar[str] = "chat"
    # The data isn't known here; a recipe sets data.max_prompt_tokens and schedule.horizon to fit it.
    max_prompt_tokens: ClassVar[int] = 512
    max_new_tokens: ClassVar[int] = 256
    horizon: ClassVar[int] = 128
    columns: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        path: str | None = None,
        answers: Literal["all", "last"] = "all",
        answer_after: str | None = None,
        holdout: int = 0,
        encoding: str = "utf-8",
    ) -> None:
        if path is None:
            raise ConfigError(
                "data.path is missing (--data-dir in the evaluation): set it to a folder of .jsonl or .parquet files"
            )
        if answer_after is not None and not answer_after.strip():
            raise ConfigError(f"answer_after is {answer_after!r}: it must be the text before a result, such as ####")
        super().__init__(path, holdout, encoding)
        self.answers = answers
        self.answer_after = answer_after
        if answer_after is not None:
            self.metrics = ("exact_match", *type(self).metrics)  # type: ignore[misc]

    def examples(self, name: str, row: Row) -> Iterator[Example]:
        found = conversations(row, last=self.answers == "last")
        for number, conversation in enumerate(found):
            yield self._example(name if len(found) == 1 else f"{name}.{number}", conversation)

    def _example(self, name: str, conversation: Conversation) -> Example:
        *history, answer = conversation.messages
        text = answer["content"].strip() or json.dumps(answer["tool_calls"], ensure_ascii=False)
        result = "" if self.answer_after is None else result_of(text, self.answer_after)
        return Example(
            id=name,
            prompt="".join(f"{message['role']}: {message['content']}\n" for message in history),
            references=(text,),
            meaning=json.dumps({"answer_after": self.answer_after, "result": result}) if result else "",
            chat=conversation.to_json(),
        )


def result_of(text: str, marker: str) -> str:
    """The result of an answer: the rest of the line after the last marker, without whitespace and commas; "" if none.

    >>> result_of("48 + 1,200 is more.\\n#### 1,248", "####")
    '1248'
    """
    _, found, rest = text.rpartition(marker)
    return "".join(rest.strip().partition("\n")[0].replace(",", "").split()) if found else ""
