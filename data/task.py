"""The base class of tasks: examples with a prompt, targets for training and references for evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

from skipdecode.errors import unknown

Split = Literal["train", "validation", "test"]
Convention = Literal["mteval", "webnlg"]  # the tokenisation of the task's published BLEU scores: eval/score/bleu.py


def check_split(split: str) -> None:
    """Raises ConfigError for an unknown split."""
    if split not in get_args(Split):
        raise unknown("split", split, get_args(Split))


@dataclass(frozen=True)
class Example:
    """A prompt with its references and targets.

    Attributes:
        id: unique name of the example.
        prompt: the model's input.
        references: texts with which predictions are compared, without placeholders.
        targets: completions to train on, which may contain placeholders; by default the references.
        substitutions: pairs of each placeholder in the prompt and the words that replace it in predictions.
        instruction: the instruction at the end of the prompt; a long prompt with one may be truncated right before it.
        meaning: what an output must state, in the task's notation, where it can be checked; else empty.
        part: the part of the test set that is scored separately, such as "seen" or "unseen"; else empty.
        chat: the conversation up to the answer (`Conversation.to_json`), from which the tokenizer's chat template then
            makes the model's input and output; else empty.
    """

    id: str
    prompt: str
    references: tuple[str, ...]
    targets: tuple[str, ...] = ()
    substitutions: tuple[tuple[str, str], ...] = ()
    instruction: str = ""
    meaning: str = ""
    part: str = ""
    chat: str = ""

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
    """A data set as prompts and completions.

    A prompt ends with a newline, or its completion starts with a space, so that they can be tokenised separately.
    Examples must depend only on the task's attributes and files, because these are the key of the cache of tokenised
    rows.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]] = ("bleu", "nist", "rouge1", "rouge2", "rougeL")  # keys of eval.score.scores
    convention: ClassVar[Convention] = "mteval"
    max_prompt_tokens: ClassVar[int]
    max_new_tokens: ClassVar[int]
    horizon: ClassVar[int]  # about the median length of a completion, in tokens

    @abstractmethod
    def stream(self, split: Split) -> Iterator[Example]:
        """The examples of a split in the order of the source, read lazily where the source allows it.

        Raises ConfigError, at the example concerned, where the source can't be read.
        """

    def load(self, split: Split) -> list[Example]:
        """All examples of a split as a list. Raises ConfigError as `stream` does."""
        return list(self.stream(split))

    def files(self, split: Split) -> tuple[Path, ...]:
        """The local files of a split. Raises ConfigError where they don't exist."""
        return ()

    def restore(self, example: Example, text: str) -> str:
        """Turn a model's raw output into a prediction: placeholders are replaced by their words."""
        return text.strip()
