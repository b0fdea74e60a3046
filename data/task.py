"""A task: where its examples come from, how a prompt reads, what a prediction is compared with."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

from skipdecode.errors import unknown

Split = Literal["train", "validation", "test"]
Convention = Literal["mteval", "webnlg"]  # by whose rules published BLEU of a task counts words: eval/score/bleu.py


def check_split(split: str) -> None:
    """Raises ConfigError for a split that no task has."""
    if split not in get_args(Split):
        raise unknown("split", split, get_args(Split))


@dataclass(frozen=True)
class Example:
    """One prompt with every text that answers it.

    `substitutions` maps each placeholder that stands in `prompt` (delexicalised tasks) to the words that are put back
    into a prediction; `references` are always in real words, `targets` are what a model is trained to write.
    `instruction` is the end of `prompt` that says what to do: a prompt that has one may be cut, always right before it.
    `meaning` is what a text must state, in the task's own notation, where it can be checked; else it is empty.
    `part` is the part of a test set that has scores of its own, such as "seen" and "unseen"; else it is empty.
    """

    id: str
    prompt: str
    references: tuple[str, ...]
    targets: tuple[str, ...] = ()
    substitutions: tuple[tuple[str, str], ...] = ()
    instruction: str = ""
    meaning: str = ""
    part: str = ""

    def __post_init__(self) -> None:
        if not self.targets:
            object.__setattr__(self, "targets", self.references)
        if not self.prompt.endswith(self.instruction):
            raise ValueError(f"the prompt of {self.id} must end in its instruction {self.instruction!r}")

    @property
    def body(self) -> str:
        """The part of the prompt that comes before the instruction."""
        return self.prompt.removesuffix(self.instruction)


class Task(ABC):
    """A data set, seen as prompts and completions.

    A prompt ends with a newline, or a completion starts with a space, so that the two can be tokenised apart. The
    attributes of a task and its files are all that its examples depend on: tokenised rows are kept under them.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]] = ("bleu", "nist", "rouge1", "rouge2", "rougeL")  # keys of eval.score.scores
    convention: ClassVar[Convention] = "mteval"
    max_prompt_tokens: ClassVar[int]
    max_new_tokens: ClassVar[int]
    horizon: ClassVar[int]  # about the median length of a completion, in tokens

    @abstractmethod
    def stream(self, split: Split) -> Iterator[Example]:
        """The examples of a split, in the order of the source, read as they are asked for where the source allows.

        Raises ConfigError, at the example that it stands in the way of, where the source can't be read.
        """

    def load(self, split: Split) -> list[Example]:
        """All examples of a split at once. Raises what `stream` raises."""
        return list(self.stream(split))

    def files(self, split: Split) -> tuple[Path, ...]:
        """The local files that the examples of a split come from. Raises ConfigError where they aren't there."""
        return ()

    def restore(self, example: Example, text: str) -> str:
        """A model's raw text with the real words put back for placeholders."""
        return text.strip()
