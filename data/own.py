"""A task of the user's own: two columns of local files, one that asks and one that answers."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

from data.source import Row, TextToText
from data.task import Example, Split
from skipdecode.errors import ConfigError


class OwnText(TextToText):
    """The task `text`: any prompts and completions in CSV, JSONL, JSON or Parquet files.

    Args:
        path: a folder with a file for each split, as `TextToText` finds them. There is no Hub to fall back on.
        prompt_column: the column with the prompts.
        completion_column: the column with what a model is to write.
        instruction: a text put behind each prompt, such as "\\n\\nTL;DR:". A prompt that is too long loses its end
            right before it; without one it is refused, and a newline ends the prompt.
        references_column: a column, of every file, with the texts that predictions are compared with, a list (in a CSV
            a JSON list) or one text; None: the completion.
        holdout: rows that are held out of the training file for each split without a file.
    """

    name: ClassVar[str] = "text"
    metrics: ClassVar[tuple[str, ...]] = ("bleu", "nist", "rouge1", "rouge2", "rougeL", "bertscore")
    # Data that isn't known has no median to go by: a recipe sets data.max_prompt_tokens and schedule.horizon.
    max_prompt_tokens: ClassVar[int] = 512
    max_new_tokens: ClassVar[int] = 128
    horizon: ClassVar[int] = 64

    def __init__(
        self,
        path: str | None = None,
        prompt_column: str | None = None,
        completion_column: str | None = None,
        instruction: str = "",
        references_column: str | None = None,
        holdout: int = 0,
    ) -> None:
        super().__init__(path, holdout)
        if path is None:
            raise ConfigError(
                "data.path is missing (--data-dir in the evaluation): name a folder of .csv or .jsonl files"
            )
        for option, column, example in (
            ("prompt_column", prompt_column, "question"),
            ("completion_column", completion_column, "answer"),
        ):
            if not column:
                raise ConfigError(
                    f"{option} is missing: name a column of the files (data.options.{option}={example}; in the "
                    f"evaluation --task-option {option}={example})"
                )
        assert prompt_column is not None
        assert completion_column is not None
        self.prompt_column, self.completion_column = prompt_column, completion_column
        self.instruction = instruction
        self.references_column = references_column

    @property
    def text_columns(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.prompt_column, self.completion_column, self.references_column)))

    def stream(self, split: Split) -> Iterator[Example]:
        """The examples of a split, one a row; in the test split rows with the same prompt are one example.

        It has the references of them all, in their order, once each, and stands where the first row does. All rows of
        that split are read first.
        """
        examples = super().stream(split)
        if split != "test":
            yield from examples
            return
        grouped: dict[str, Example] = {}
        for example in examples:
            first = grouped.setdefault(example.prompt, example)
            if first is not example:
                grouped[example.prompt] = replace(
                    first,
                    references=tuple(dict.fromkeys((*first.references, *example.references))),
                    targets=(*first.targets, *example.targets),
                )
        for number, example in enumerate(grouped.values()):
            yield replace(example, id=f"{self.name}-{split}-{number}")

    def example(self, name: str, row: Row) -> Example:
        """The prompt with the instruction or a newline behind it, and its completion, parted from it by one blank."""
        completion = row.text(self.completion_column).strip()
        end = self.instruction or "\n"
        return Example(
            id=name,
            prompt=row.text(self.prompt_column).strip() + end,
            references=(completion,) if self.references_column is None else _texts(row, self.references_column),
            targets=(completion if end[-1].isspace() else " " + completion,),
            instruction=self.instruction,
        )


def _texts(row: Row, column: str) -> tuple[str, ...]:
    """A list of texts, a JSON list in a text, or one text. Raises ConfigError for anything else or an empty text."""
    value = row.values.get(column)
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):  # a text may start with a bracket, or with thousands
            value = json.loads(value)
    if not isinstance(value, list):
        return (row.text(column).strip(),)
    if not value or not all(isinstance(text, str) and text.strip() for text in value):
        raise ConfigError(f"{row.where}: {column} is {value!r}: it must be a list of texts, none of them empty")
    return tuple(text.strip() for text in value)
