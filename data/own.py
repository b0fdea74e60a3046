"""A task of the user's own: two columns of local files, one that asks and one that answers."""

import json
import reprlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

from data.files import Row
from data.source import TextToText
from data.task import Example, Split
from skipdecode.errors import ConfigError


class OwnText(TextToText):
    """The task `text`: any prompts and completions in CSV, TSV, JSON or Parquet files, kept as they are written.

    Args:
        path: a folder with a file for each split, as `TextToText` finds them. There is no Hub to fall back on.
        prompt_column: the column with the prompts.
        completion_column: the column with what a model is to write.
        instruction: a text put behind each prompt, such as "\\n\\nTL;DR:". A prompt that is too long loses its end
            right before it; without one it is refused, and a newline ends the prompt.
        references_column: a column, of every file, with the texts that predictions are compared with, a list (in a CSV
            a JSON list) or one text; None: the completion.
        holdout: rows that are held out of the training file for each split without a file.
        encoding: of the files that are text, as Python names it.
        strip: take the whitespace around prompts, completions and references off.
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
        encoding: str = "utf-8",
        strip: bool = False,
    ) -> None:
        if path is None:
            raise ConfigError(
                "data.path is missing (--data-dir in the evaluation): name a folder of .csv or .jsonl files"
            )
        super().__init__(path, holdout, encoding)
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
        self.strip = strip

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
        """The prompt with the instruction or a newline behind it, and its completion behind what parts the two."""
        completion = self._kept(row.text(self.completion_column))
        column = self.references_column
        return Example(
            id=name,
            prompt=self._kept(row.text(self.prompt_column)) + self._end,
            references=(completion,) if column is None else tuple(map(self._kept, _texts(row, column))),
            targets=(self._separator + completion,),
            instruction=self.instruction,
        )

    def restore(self, example: Example, text: str) -> str:
        """A prediction without what parts it from the prompt: what a completion was before it became a target."""
        return self._kept(text.removeprefix(self._separator))

    @property
    def _end(self) -> str:
        return self.instruction or "\n"

    @property
    def _separator(self) -> str:
        """One blank, unless the prompt ends in whitespace: the two are tokenised apart."""
        return "" if self._end[-1].isspace() else " "

    def _kept(self, text: str) -> str:
        return text.strip() if self.strip else text


def _texts(row: Row, column: str) -> tuple[str, ...]:
    """A list of texts, a JSON list in a text, or one text. Raises ConfigError for anything else or an empty text."""
    value = row.values.get(column)
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):  # a text may start with a bracket, or with thousands
            value = json.loads(value)
    if not isinstance(value, list):
        return (row.text(column),)
    if not value or not all(isinstance(text, str) and text.strip() for text in value):
        raise ConfigError(
            f"{row.where}: {column} is {reprlib.repr(value)}: it must be a list of texts, none of them empty"
        )
    return tuple(value)
