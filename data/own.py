"""The task for a user's own data: local files with a prompt column and a completion column."""

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
    """The task `text`: prompts and completions from CSV, TSV, JSON or Parquet files, used unchanged.

    Args:
        path: a folder with a file for each split, as in `TextToText`; required.
        prompt_column: the column with the prompts.
        completion_column: the column with the completions.
        instruction: text appended to each prompt, such as "\\n\\nTL;DR:"; a prompt that is too long is truncated right
            before it. Without an instruction a newline ends the prompt, and a prompt that is too long is an error.
        references_column: a column, in every file, with the references for the metrics: a list (in CSV, a JSON list) or
            one text; None: the completion is the reference.
        holdout: number of rows held out of the training file for each split without a file.
        encoding: encoding of text files, by Python's name.
        strip: whether to strip whitespace around prompts, completions and references.
    """

    name: ClassVar[str] = "text"
    metrics: ClassVar[tuple[str, ...]] = ("bleu", "nist", "rouge1", "rouge2", "rougeL", "bertscore")
    # The data isn't known here; a recipe sets data.max_prompt_tokens and schedule.horizon to fit it.
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
                "data.path is missing (--data-dir in the evaluation): set it to a folder of .csv or .jsonl files"
            )
        super().__init__(path, holdout, encoding)
        for option, column, example in (
            ("prompt_column", prompt_column, "question"),
            ("completion_column", completion_column, "answer"),
        ):
            if not column:
                raise ConfigError(
                    f"{option} is missing: set it to a column of the files (data.options.{option}={example}; in the "
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
        """The examples of a split, one per row; in the test split, rows with the same prompt form one example.

        Such an example has the distinct references of its rows, and takes the position of the first row. All rows of
        the test split are read before the first example is yielded.
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

    def examples(self, name: str, row: Row) -> Iterator[Example]:
        """The prompt with its instruction or a newline, and the completion with the separator before it."""
        completion = self._stripped(row.text(self.completion_column))
        column = self.references_column
        yield Example(
            id=name,
            prompt=self._stripped(row.text(self.prompt_column)) + self._end,
            references=(completion,) if column is None else tuple(map(self._stripped, _texts(row, column))),
            targets=(self._separator + completion,),
            instruction=self.instruction,
        )

    def restore(self, example: Example, text: str) -> str:
        """A prediction without the separator, which is how completions are written in the files."""
        return self._stripped(text.removeprefix(self._separator))

    @property
    def _end(self) -> str:
        return self.instruction or "\n"

    @property
    def _separator(self) -> str:
        """One space, unless the prompt ends in whitespace; prompt and completion are tokenised separately."""
        return "" if self._end[-1].isspace() else " "

    def _stripped(self, text: str) -> str:
        return text.strip() if self.strip else text


def _texts(row: Row, column: str) -> tuple[str, ...]:
    """The texts of a list, a JSON list, or one text. Raises ConfigError for anything else and for empty texts."""
    value = row.values.get(column)
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):  # an ordinary text may start with brackets too
            value = json.loads(value)
    if not isinstance(value, list):
        return (row.text(column),)
    if not value or not all(isinstance(text, str) and text.strip() for text in value):
        raise ConfigError(
            f"{row.where}: {column} is {reprlib.repr(value)}: it must be a list of texts, none of them empty"
        )
    return tuple(value)
