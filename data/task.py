"""What a task is: where its examples come from, how a prompt reads, what a prediction is compared with."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Example:
    """One prompt with every text that answers it.

    `substitutions` maps each placeholder that stands in `prompt` (delexicalised tasks) to the words that are put back
    into a prediction; `references` are always in real words, `targets` are what a model is trained to write.
    """

    id: str
    prompt: str
    references: tuple[str, ...]
    targets: tuple[str, ...] = ()
    substitutions: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.targets:
            object.__setattr__(self, "targets", self.references)


class Task(ABC):
    """A data set, seen as prompts and completions.

    A prompt ends with a newline and a completion starts right after it, so that the two can be tokenised apart.
    """

    name: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]  # what a row of the source must have
    metrics: ClassVar[tuple[str, ...]] = ("bleu", "rouge1", "rouge2", "rougeL")
    max_prompt_tokens: ClassVar[int]
    max_new_tokens: ClassVar[int]
    horizon: ClassVar[int]  # about the median length of a completion, in tokens

    @abstractmethod
    def load(self, split: Split) -> list[Example]:
        """The examples of a split, in the order of the source. Raises ConfigError where the source can't be read."""

    def restore(self, example: Example, text: str) -> str:
        """A model's raw text with the real words put back for placeholders."""
        return text.strip()
