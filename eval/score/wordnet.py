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
FOLDER = "WNSEARCHDIR"  # the environment variable that names the dictionary's folder to WordNet's own programs
_KINDS = ("noun", "verb", "adj", "adv")
_FILES = tuple(name for kind in _KINDS for name in (f"index.{kind}", f"data.{kind}", f"{kind}.exc"))


def installed_wordnet() -> Any:
    """A reader of the WordNet that is installed: nltk's data, else the folder of WNSEARCHDIR, else Debian's.

    Raises NotAvailableError where there is none.
    """
    try:
        nltk.corpus.wordnet.ensure_loaded()
        return nltk.corpus.wordnet
    except (LookupError, OSError):
        folder = Path(os.environ.get(FOLDER) or DEBIAN)
    lacking = [name for name in _FILES if not (folder / name).is_file()]
    if lacking:
        raise NotAvailableError(
            "no WordNet is installed: `apt install wordnet-base`, or `python -m nltk.downloader wordnet`, or name the "
            f"folder of its dictionary in {FOLDER} ({folder} has no {lacking[0]})"
        )
    return _read(folder)


@lru_cache(maxsize=1)  # seconds
def _read(folder: Path) -> Any:
    nltk.data.path.append(str(folder))  # nltk reads below the folders that it lists, and nowhere else
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no other languages
        return _Dictionary(str(folder), None)


class _Dictionary(WordNetCorpusReader):  # type: ignore[misc]
    """A folder as WordNet's authors release it, to look up synonyms in."""

    def open(self, file: str) -> Any:
        """A file of the folder; of the names of fields, which Debian leaves out, numbers are enough."""
        if file == "lexnames":
            return io.StringIO("".join(f"{number:02d}\tfield.{number}\t1\n" for number in range(45)))
        return super().open(file)

    def map_wn(self, version: str = "wordnet") -> None:
        """No map between versions: synonyms need none."""
