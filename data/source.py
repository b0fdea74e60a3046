"""Tasks with an input text and an output text per row, read from local files or from the Hub."""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from data.files import ENDINGS, Row, check_encoding, ending_of, file_rows, in_order
from data.task import Example, Split, Task, check_split
from skipdecode.errors import ConfigError

# The prefixes of file names for each split, matched without case.
PREFIXES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}


class TextToText(Task):
    """A task whose rows are pairs of input and output, from a folder of files or, without one, from the Hub.

    Args:
        path: a folder with a file, or all shards (`train-00000-of-00002.parquet`), for each split. File names start
            with train, validation (or valid, val, dev) or test, and end in .csv, .tsv, .jsonl or .json, each also
            followed by .gz, or in .parquet.
        holdout: number of rows for the validation split and for the test split where they have no file. The rows are
            taken from the end of the training file (the test split's last) and aren't trained on. The Hub has every
            split, so none are held out there.
        encoding: encoding of text files, by Python's name.
    """

    metrics: ClassVar[tuple[str, ...]] = ("bleu", "rouge1", "rouge2", "rougeL", "bertscore")
    columns: ClassVar[tuple[str, ...]]  # what a row of the source must have
    repository: ClassVar[str]
    configuration: ClassVar[str | None] = None

    def __init__(self, path: str | None = None, holdout: int = 0, encoding: str = "utf-8") -> None:
        if type(holdout) is not int or holdout < 0:
            raise ConfigError(f"holdout is {holdout!r}: it must be an integer of 0 or more")
        check_encoding(encoding)
        if path is None and encoding != "utf-8":
            raise ConfigError(f"encoding is {encoding!r}: it applies to local files only, and data.path isn't set")
        self.path = Path(path) if path is not None else None
        self.holdout = holdout
        self.encoding = encoding

    def stream(self, split: Split) -> Iterator[Example]:
        """The examples of a split; memory holds at most the held-out rows and the current one."""
        check_split(split)
        rows = self._hub_rows(split) if self.path is None else self._local_rows(split)
        for number, row in enumerate(rows):
            yield from self.examples(f"{self.name}-{split}-{number}", row)

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The columns that are read, each of which a table must have exactly once."""
        return self.columns

    @abstractmethod
    def examples(self, name: str, row: Row) -> Iterator[Example]:
        """Make the examples of a row; `name` starts their ids. Raises ConfigError for an invalid row."""

    def files(self, split: Split) -> tuple[Path, ...]:
        """The files of a split; with a holdout, the files of all splits, because they determine what is held out."""
        if self.path is None:
            return ()
        found = self._found()
        if split not in found and (not self.holdout or "train" not in found):
            names = " or ".join(PREFIXES[split])
            advice = f"add a file whose name starts with {names} and ends in {ENDINGS}"
            if split != "train":
                advice += ", or hold rows out of the training file with the option holdout (data.options.holdout=100)"
            raise ConfigError(f"split {split!r} of {self.name} has no file in {self.path}: {advice}")
        return tuple(file for files in found.values() for file in files) if self.holdout else found[split]

    def _found(self) -> dict[Split, tuple[Path, ...]]:
        """The file, or the shards in their order, of each split that has one."""
        assert self.path is not None
        check_folder(self.path)
        files = sorted(file for file in self.path.iterdir() if ending_of(file) and file.is_file())
        found: dict[Split, tuple[Path, ...]] = {}
        for split, prefixes in PREFIXES.items():
            if matches := [file for file in files if file.name.lower().startswith(prefixes)]:
                found[split] = in_order(matches)
        return found

    def _local_rows(self, split: Split) -> Iterator[Row]:
        self.files(split)  # raises ConfigError for a split that can't be read
        found = self._found()
        if split != "train" and split in found:
            yield from self._rows(found[split])
            return
        without_file: list[Split] = [name for name in ("validation", "test") if name not in found]
        held_out = self.holdout * len(without_file)
        last: deque[Row] = deque()  # the most recent rows, which at the end are the held-out ones
        enough = False
        for row in self._rows(found["train"]):
            last.append(row)
            if len(last) > held_out:
                enough = True
                first = last.popleft()
                if split == "train":
                    yield first
        if not enough:
            first_file, *others = found["train"]
            has = f"and its other shards ({len(others)}) have" if others else "has"
            raise ConfigError(
                f"holdout is {self.holdout}: {first_file} {has} only {len(last)} rows, too few to hold out {held_out} "
                "and train on the rest"
            )
        if split != "train":
            start = without_file.index(split) * self.holdout
            yield from list(last)[start : start + self.holdout]

    def _rows(self, files: Sequence[Path]) -> Iterator[Row]:
        """The rows of all shards; single shards may be empty, but not all of them."""
        empty = True
        for file in files:
            for row in file_rows(file, self.text_columns, self.encoding):
                empty = False
                yield row
        if empty:
            raise ConfigError(f"{files[0]} has no rows{', and neither do the other shards' if len(files) > 1 else ''}")

    def _hub_rows(self, split: Split) -> Iterator[Row]:
        options: dict[str, Any] = {"name": self.configuration} if self.configuration else {}
        return hub_rows(self.repository, split, streaming=True, **options)


def check_folder(path: Path) -> None:
    """Raises ConfigError where a task's folder doesn't exist."""
    if not path.is_dir():
        raise ConfigError(f"data.path is {str(path)!r}: no such folder")


def hub_rows(repository: str, split: Split, **options: Any) -> Iterator[Row]:
    """The rows of a split on the Hub. Options are those of `load_dataset`. Raises ConfigError where the Hub fails."""
    import datasets  # imported here, because it takes seconds and local files don't need it

    try:
        for number, values in enumerate(datasets.load_dataset(repository, split=split, **options), start=1):
            yield Row(f"{repository}, {split}, row {number}", values)
    except Exception as error:  # a missing network raises many different types
        raise ConfigError(
            f"{repository} can't be read from the Hub ({type(error).__name__}): "
            "use a local folder with data.path=FOLDER (--data-dir FOLDER in the evaluation)"
        ) from error
