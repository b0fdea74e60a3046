"""WordNet for METEOR: nltk's own data, or the dictionary folder that Debian's package `wordnet-base` installs."""

import io
import os
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import nltk
from nltk.corpus.reader.wordnet import WordNetCorpusReader

from eval.score.metric import NotAvailableError

DEBIAN = Path("/usr/share/wordnet")
FOLDER = "WNSEARCHDIR"  # the environment variable of WordNet for its dictionary folder
_KINDS = ("noun", "verb", "adj", "adv")
_FILES = tuple(name for kind in _KINDS for name in (f"index.{kind}", f"data.{kind}", f"{kind}.exc"))


def installed_wordnet() -> Any:
    """A reader of the installed WordNet: nltk's data, else the folder in WNSEARCHDIR, else Debian's.

    Raises NotAvailableError where none is installed.
    """
    try:
        nltk.corpus.wordnet.ensure_loaded()
        return nltk.corpus.wordnet
    except (LookupError, OSError):
        folder = Path(os.environ.get(FOLDER) or DEBIAN)
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise NotAvailableError(
            "WordNet isn't installed: run `apt install wordnet-base` or `python -m nltk.downloader wordnet`, or set "
            f"{FOLDER} to its dictionary folder ({folder} has no {missing[0]})"
        )
    return _read(folder)


@lru_cache(maxsize=1)  # reading takes seconds
def _read(folder: Path) -> Any:
    nltk.data.path.append(str(folder))  # nltk only reads below the folders in this list
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing other languages
        return _Dictionary(str(folder), None)


class _Dictionary(WordNetCorpusReader):  # type: ignore[misc]
    """A reader of a dictionary folder in the format of WordNet, for synonyms."""

    def open(self, file: str) -> Any:
        """Open a file of the folder. Debian omits lexnames, whose content doesn't matter for synonyms."""
        if file == "lexnames":
            return io.StringIO("".join(f"{number:02d}\tfield.{number}\t1\n" for number in range(45)))
        return super().open(file)

    def map_wn(self, version: str = "wordnet") -> None:
        """Skip the map between versions, which synonyms don't need."""
