"""ViGGO: utterances about video games, from dialogue acts with slots (Juraska, Bowden, Walker, INLG 2019)."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from data.pairs import by_meaning, csv_pairs
from data.placeholders import capitals, check_slots, hide, placeholder, put_back
from data.source import check_folder, hub_rows
from data.task import Example, Split, Task, check_split
from skipdecode.errors import ConfigError

ACTS = (
    *("inform", "confirm", "give_opinion", "recommend", "request", "request_attribute", "request_explanation"),
    *("suggest", "verify_attribute"),
)
SLOTS = (
    *("name", "release_year", "exp_release_date", "developer", "specifier", "rating", "esrb", "genres"),
    *("player_perspective", "platforms", "has_multiplayer", "available_on_steam", "has_linux_release"),
    "has_mac_release",
)
FILES: dict[Split, str] = {"train": "train.csv", "validation": "valid.csv", "test": "test.csv"}
HUB_REPOSITORY, HUB_REVISION = "GEM/viggo", "refs/convert/parquet"

_ACT = re.compile(r"\s*(\w+)\((.*)\)\s*", re.DOTALL)
_SLOT = re.compile(r"\s*(\w+)\[([^\]]*)\]\s*(?:,|$)")


@dataclass(frozen=True)
class Meaning:
    """A dialogue act and its slots in order; a slot that the act asks for has an empty value."""

    act: str
    slots: dict[str, str]


class ViGGO(Task):
    """ViGGO from a folder with its CSV files, or from the Hub without one.

    A prompt is `act | slot: value | …`.

    Args:
        path: a folder with `train.csv`, `valid.csv` and `test.csv` (columns `mr`, `ref`).
        delexicalise: slots whose values are replaced by placeholders in prompts and targets, and restored in
            predictions before scoring.
    """

    name: ClassVar[str] = "viggo"
    metrics: ClassVar[tuple[str, ...]] = (
        "bleu",
        "nist",
        "meteor",
        "rouge1",
        "rouge2",
        "rougeL",
        "cider",
        "slot_error_rate",
    )
    max_prompt_tokens: ClassVar[int] = 128
    max_new_tokens: ClassVar[int] = 96
    horizon: ClassVar[int] = 32

    def __init__(self, path: str | None = None, delexicalise: Sequence[str] = ()) -> None:
        self.path = Path(path) if path is not None else None
        self.delexicalise = check_slots(delexicalise, SLOTS)

    def stream(self, split: Split) -> Iterator[Example]:
        """The examples of a split, one per meaning representation, in the order of first rows, which are all read."""
        check_split(split)
        rows = self._hub_rows(split) if self.path is None else csv_pairs(self.files(split)[0], parse_act)
        for number, (mr, references) in enumerate(by_meaning(rows).items()):
            yield self._example(f"{self.name}-{split}-{number}", mr, references)

    def files(self, split: Split) -> tuple[Path, ...]:
        if self.path is None:
            return ()
        check_folder(self.path)
        if not (self.path / FILES[split]).exists():
            raise ConfigError(f"data.path is {str(self.path)!r}: it has no {FILES[split]}")
        return (self.path / FILES[split],)

    def restore(self, example: Example, text: str) -> str:
        """Replace placeholders by their words, correcting a/an and the capitals of sentences."""
        return capitals(put_back(text, example.substitutions)) if example.substitutions else text.strip()

    def _example(self, name: str, mr: str, references: Sequence[str]) -> Example:
        meaning = parse_act(mr)
        hidden = {slot: value for slot, value in meaning.slots.items() if slot in self.delexicalise and value}
        shown = [
            f"{slot}: {placeholder(slot) if slot in hidden else value}".strip() for slot, value in meaning.slots.items()
        ]
        return Example(
            id=name,
            prompt=" | ".join([meaning.act, *shown]) + "\n",
            references=tuple(references),
            targets=tuple(hide(reference, hidden) for reference in references),
            substitutions=tuple((placeholder(slot), value) for slot, value in hidden.items()),
            meaning=mr,
        )

    def _hub_rows(self, split: Split) -> Iterator[tuple[str, str]]:
        for row in hub_rows(HUB_REPOSITORY, split, revision=HUB_REVISION):
            yield row.text("meaning_representation"), row.text("target")


def is_act(meaning: str) -> bool:
    """Whether a meaning is in this task's notation, `act(…)`."""
    return _ACT.fullmatch(meaning) is not None


def parse_act(mr: str) -> Meaning:
    """Parse a meaning representation such as `inform(name[Tetris], genres[puzzle])`.

    Raises ConfigError for invalid text.
    """
    act = _ACT.fullmatch(mr)
    if act is None or act[1] not in ACTS:
        raise ConfigError(
            f"not a meaning representation, {mr[:40]!r}: expected act(slot[value], …) with one of {', '.join(ACTS)}"
        )
    slots: dict[str, str] = {}
    at = 0
    while at < len(act[2]):
        slot = _SLOT.match(act[2], at)
        if slot is None or slot[1] not in SLOTS or slot[1] in slots:
            raise ConfigError(f"not a meaning representation, near {act[2][at : at + 40]!r}: expected slot[value], …")
        slots[slot[1]] = slot[2].strip()
        at = slot.end()
    if not slots:
        raise ConfigError(f"a meaning representation without slots: {mr[:40]!r}")
    return Meaning(act[1], slots)
