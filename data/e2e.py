"""E2E NLG: restaurant meaning representations and their descriptions (Novikova, Dušek, Rieser, SIGDIAL 2017)."""

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from data.e2e_slots import MENTIONS, SLOTS, slot_errors
from data.pairs import by_meaning, csv_pairs
from data.placeholders import capitals, check_slots, hide, placeholder, put_back
from data.source import check_folder, hub_rows
from data.task import Example, Split, Task, check_split
from skipdecode.errors import ConfigError

HUB_REPOSITORY, HUB_REVISION = "tuetschek/e2e_nlg", "refs/convert/parquet"

_SLOT = re.compile(r"\s*([^\[\],]+)\[([^\]]*)\]\s*(?:,|$)")


class E2E(Task):
    """E2E NLG from a folder with its CSV files, or from the Hub without one.

    Args:
        path: a folder with `devset.csv` and `testset_w_refs.csv` (columns `mr`, `ref`). If it has `trainset.csv`, that
            is the training split and `devset.csv` the validation split; otherwise `devset.csv` is the training split.
        delexicalise: slots whose values are replaced by placeholders in prompts and targets, and restored in
            predictions before scoring. A model trained from scratch can't write names that it never saw.
        faithful: train only on the references of each MR that omit the fewest slots. One reference in six omits
            something, and a small model learns to omit much more.
        clean: train only on the references of each MR that have the fewest slot errors, as the metric counts them.
            Models learn the errors of their references (Dušek, Howcroft and Rieser, INLG 2019).
        concise: train only on the shorter half (in words) of the remaining references of each MR. A small model trained
            on all of them writes longer texts than the references.
        holdout: number of meaning representations of `devset.csv`, evenly spaced, that form the validation split and
            aren't trained on, where there is no `trainset.csv`. The Hub has every split, so none are held out there.
    """

    name: ClassVar[str] = "e2e"
    metrics: ClassVar[tuple[str, ...]] = (
        *("bleu", "nist", "meteor", "rouge1", "rouge2", "rougeL", "cider"),
        "slot_error_rate",
    )
    max_prompt_tokens: ClassVar[int] = 128
    max_new_tokens: ClassVar[int] = 96
    horizon: ClassVar[int] = 32

    def __init__(
        self,
        path: str | None = None,
        delexicalise: Sequence[str] = (),
        faithful: bool = False,
        clean: bool = False,
        concise: bool = False,
        holdout: int = 0,
    ) -> None:
        if type(holdout) is not int or holdout < 0:
            raise ConfigError(f"holdout is {holdout!r}: it must be an integer of 0 or more")
        self.path = Path(path) if path is not None else None
        self.delexicalise = check_slots(delexicalise, SLOTS)
        self.faithful = faithful
        self.clean = clean
        self.concise = concise
        self.holdout = holdout

    def stream(self, split: Split) -> Iterator[Example]:
        """The examples of a split, one per meaning representation, in the order of first rows.

        All rows are read first, because rows of one meaning representation needn't be adjacent, nor have its slots in
        the same order.
        """
        check_split(split)
        rows = self._hub_rows(split) if self.path is None else csv_pairs(self._file(split), parse_mr)
        grouped = by_meaning((_written(parse_mr(mr)), text) for mr, text in rows)
        if split != "test" and self._holds_out():
            if self.holdout >= len(grouped):
                raise ConfigError(f"holdout is {self.holdout}: devset.csv has {len(grouped)} meaning representations")
            held = {n * len(grouped) // self.holdout for n in range(self.holdout)}
            wanted = split == "validation"
            grouped = {mr: refs for n, (mr, refs) in enumerate(grouped.items()) if (n in held) == wanted}
        for n, (mr, references) in enumerate(grouped.items()):
            yield self._example(f"{self.name}-{split}-{n}", parse_mr(mr), references)

    def files(self, split: Split) -> tuple[Path, ...]:
        """The file of a split; for validation also the training file, which may determine what is held out."""
        if self.path is None:
            return ()
        return (self._file("train"), self._file(split)) if split == "validation" else (self._file(split),)

    def restore(self, example: Example, text: str) -> str:
        """Replace placeholders by their words, correcting a/an and the capitals of sentences."""
        text = put_back(text, example.substitutions)
        return capitals(re.sub(r"\b(food) food\b", r"\1", text, flags=re.IGNORECASE))  # "Fast food", "<food> food"

    def _example(self, name: str, slots: dict[str, str], references: list[str]) -> Example:
        hidden = {slot: value for slot, value in slots.items() if slot in self.delexicalise}
        shown = " | ".join(f"{slot}: {placeholder(slot) if slot in hidden else slots[slot]}" for slot in slots)
        # A target without a placeholder of the prompt ("British" for English) would teach the model to state a fact
        # that it can't see.
        wanted = slots if self.faithful else hidden
        texts = [hide(reference, hidden) for reference in references]
        omitted = [sum(not _states(text, slot, hidden) for slot in wanted) for text in texts]
        errors = [slot_errors(reference, slots).count if self.clean else 0 for reference in references]
        faults = [sum(counts) for counts in zip(omitted, errors, strict=True)]
        targets = [text for text, count in zip(texts, faults, strict=True) if count == min(faults)]
        if self.concise:
            targets = _shorter_half(targets)
        return Example(
            id=name,
            prompt=shown + "\n",
            references=tuple(references),
            targets=tuple(targets),
            substitutions=tuple((placeholder(slot), value) for slot, value in hidden.items()),
            meaning=_written(slots),
        )

    def _file(self, split: Split) -> Path:
        assert self.path is not None
        check_folder(self.path)
        if (self.path / "trainset.csv").exists():
            names = {"train": "trainset.csv", "validation": "devset.csv", "test": "testset_w_refs.csv"}
        else:
            names = {"train": "devset.csv", "test": "testset_w_refs.csv"}
            if self.holdout:
                names["validation"] = "devset.csv"
        if split not in names:
            raise ConfigError(
                f"split {split!r} of E2E needs trainset.csv in {self.path}, which doesn't exist: hold out some of "
                "devset.csv with the option holdout (data.options.holdout=60)"
            )
        file = self.path / names[split]
        if not file.exists():
            raise ConfigError(f"data.path is {str(self.path)!r}: it has no {file.name}")
        return file

    def _holds_out(self) -> bool:
        return self.holdout > 0 and self.path is not None and not (self.path / "trainset.csv").exists()

    def _hub_rows(self, split: Split) -> Iterator[tuple[str, str]]:
        for row in hub_rows(HUB_REPOSITORY, split, revision=HUB_REVISION):
            yield row.text("meaning_representation"), row.text("human_reference")


def parse_mr(mr: str) -> dict[str, str]:
    """Parse a meaning representation such as `name[Aromi], area[riverside]`; slots are in the order of SLOTS.

    Raises ConfigError for invalid text.
    """
    found: dict[str, str] = {}
    at = 0
    while at < len(mr):
        match = _SLOT.match(mr, at)
        if match is None or match[1] not in SLOTS or match[1] in found or not match[2].strip():
            raise ConfigError(f"not a meaning representation, near {mr[at : at + 40]!r}: expected slot[value], …")
        found[match[1]] = match[2].strip()
        at = match.end()
    if not found:
        raise ConfigError("the meaning representation is empty")
    return {slot: found[slot] for slot in SLOTS if slot in found}


def _written(slots: dict[str, str]) -> str:
    """Write slots as a meaning representation."""
    return ", ".join(f"{slot}[{value}]" for slot, value in slots.items())


def read_meaning(text: str) -> dict[str, str]:
    """Parse a meaning representation, or a prompt of this task (`name: Aromi | area: riverside`).

    Raises ConfigError for other text, and for a prompt with a placeholder, which hides the value.
    """
    text = text.strip()
    if "[" in text or ": " not in text:
        return parse_mr(text)
    pairs = [part.partition(": ") for part in text.split(" | ")]
    slots = parse_mr(", ".join(f"{slot}[{value}]" for slot, _, value in pairs))
    hidden = [slot for slot, value in slots.items() if value == placeholder(slot)]
    if hidden:
        raise ConfigError(
            f"the prompt has the placeholder {placeholder(hidden[0])} instead of the value of {hidden[0]}"
        )
    return slots


def _shorter_half(texts: Sequence[str]) -> list[str]:
    """The half of the texts, rounded up, with the fewest words, in the given order."""
    words = [len(text.split()) for text in texts]
    shortest = sorted(range(len(texts)), key=words.__getitem__)[: (len(texts) + 1) // 2]
    return [texts[n] for n in sorted(shortest)]


def _states(text: str, slot: str, hidden: Collection[str]) -> bool:
    """Whether a text with placeholders states a slot; True for slots without a pattern."""
    if slot in hidden:
        return placeholder(slot) in text
    return slot not in MENTIONS or bool(MENTIONS[slot].search(text))
