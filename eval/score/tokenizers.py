"""The tokenizers of sacrebleu that may stand in for each metric's own words, and which languages need one.

Without one, BLEU, NIST and METEOR count mteval's 13a words, ROUGE those of rouge-score, CIDEr those of the Penn
Treebank. These are made for English: scores of other languages may need other words, and the functions below say when.
"""

import socket
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Literal, TypeAlias

import regex
import sacrebleu.utils
from sacrebleu.metrics import BLEU

from skipdecode.errors import ConfigError, first_line, unknown

Words: TypeAlias = Callable[[str], list[str]]

# Scripts that put no spaces between words.
UNSPACED = (
    *("Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan", "Yi"),
    *("Javanese", "Balinese", "Tai_Le", "New_Tai_Lue", "Tai_Tham", "Tai_Viet"),
)
Tokenizer: TypeAlias = Literal["13a", "intl", "zh", "ja-mecab", "ko-mecab", "flores101", "flores200", "char", "none"]
# Tokenizer -> those of these scripts whose words (or characters) it separates.
TOKENIZERS: dict[str, tuple[str, ...]] = {
    "13a": (),
    "intl": (),
    "zh": ("Han",),
    "ja-mecab": ("Han", "Hiragana", "Katakana"),
    "ko-mecab": (),
    "flores101": UNSPACED,
    "flores200": UNSPACED,
    "char": UNSPACED,
    "none": UNSPACED,  # whoever names it says that spaces separate the words already
}
_PACKAGES = {
    "ja-mecab": "'sacrebleu[ja]'",
    "ko-mecab": "'sacrebleu[ko]'",
    "flores101": "sentencepiece",
    "flores200": "sentencepiece",
}
_DOWNLOAD_SECONDS = 30.0  # without an answer; sacrebleu itself waits for ever
# Above this share of letters that a metric's words can't represent, its score says little of the texts. English texts
# are far below it, names with accents included (E2E: 0.2 %).
MOST_LOST = 0.1

_UNSPACED_LETTERS = {script: regex.compile(rf"(?=\p{{L}})\p{{Script={script}}}") for script in UNSPACED}


def check_tokenizer(name: str | None) -> None:
    """Raise ConfigError for a name that is no tokenizer."""
    if name is not None and name not in TOKENIZERS:
        raise unknown("tokenizer", name, TOKENIZERS)


@lru_cache(maxsize=1)
def load_tokenizer(name: str) -> BLEU:
    """A scorer of sacrebleu's with the tokenizer of that name, as its attribute `tokenizer`.

    Raises ConfigError for a name that is no tokenizer, and where a package or a model is missing that it needs.
    """
    check_tokenizer(name)
    try:
        with _timeout(_DOWNLOAD_SECONDS):
            return BLEU(tokenize=name, lowercase=True, effective_order=True)
    except OSError as error:
        folder = sacrebleu.utils.SACREBLEU_DIR
        raise ConfigError(
            f"the tokenizer {name!r} needs a model that sacrebleu downloads once into {folder}/models, and that "
            f"failed: {first_line(error)}"
        ) from error
    # sacrebleu ends the process where the certificate of a server isn't known.
    except (ImportError, RuntimeError, AssertionError, SystemExit) as error:
        raise ConfigError(
            f"the tokenizer {name!r} needs a package that isn't installed, or doesn't work: pip install "
            f"{_PACKAGES.get(name, 'sacrebleu')} ({first_line(error)})"
        ) from error


@contextmanager
def _timeout(seconds: float) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def words_by(tokenizer: str | None, own: Words) -> Words:
    """What splits a text into words in lower case: a tokenizer of sacrebleu's, or without one the metric's own."""
    if tokenizer is None:
        return own
    split = load_tokenizer(tokenizer).tokenizer
    return lambda text: str(split(text.lower().rstrip())).split()


def without_punctuation(words: Sequence[str]) -> list[str]:
    """The words that hold anything but punctuation (and the mark of sentencepiece for the beginning of a word).

    >>> without_punctuation(["«", "да", "»", "👍", "▁。"])
    ['да', '👍']
    """
    return [word for word in words if not all(sign == "▁" or unicodedata.category(sign)[0] == "P" for sign in word)]


def signature(tokenizer: str) -> str:
    """The name of a tokenizer in reports: sacrebleu's, with the version where there is one."""
    return str(load_tokenizer(tokenizer).tokenizer.signature())


def lost_letters(texts: Sequence[str], kept: Callable[[str], bool]) -> float:
    """The share of the letters of texts that a metric's words don't keep; 0 of texts without letters.

    Args:
        kept: says whether they keep a letter; asked of letters outside ASCII alone.
    """
    lost = sum(
        letter.isalpha() and not kept(letter) for text in texts if not text.isascii() for letter in text if letter > "~"
    )
    return lost / _letters(texts) if lost else 0.0


def unspaced(texts: Sequence[str], tokenizer: str | None = None) -> list[str]:
    """Scripts of texts whose words neither spaces nor the tokenizer separates; none where few of the letters are."""
    separated = TOKENIZERS[tokenizer] if tokenizer is not None else ()
    found = {
        script: sum(len(letter.findall(text)) for text in texts if not text.isascii())
        for script, letter in _UNSPACED_LETTERS.items()
        if script not in separated
    }
    count = sum(found.values())
    if not count or count / _letters(texts) <= MOST_LOST:
        return []
    return sorted(filter(found.__getitem__, found), key=lambda script: -found[script])


def _letters(texts: Sequence[str]) -> int:
    return sum(sum(map(str.isalpha, text)) for text in texts)


def suitable(texts: Sequence[str]) -> str:
    """The tokenizers that suit the scripts of texts, for messages.

    >>> suitable(["Привет, мир"]), suitable(["你好"])
    ('intl', 'zh, flores200 or char')
    """
    scripts = set(unspaced(texts))
    if not scripts:
        return "intl"
    fitting = [name for name in ("zh", "ja-mecab") if scripts <= set(TOKENIZERS[name])][:1]
    return f"{', '.join([*fitting, 'flores200'])} or char"


def unspaced_obstacle(texts: Sequence[str], tokenizer: str | None, own: str) -> str | None:
    """Say why a metric can't count the words of texts that have no spaces between them; None where it can.

    Args:
        own: what the metric's own words are called.
    """
    scripts = unspaced(texts, tokenizer)
    if not scripts:
        return None
    return (
        f"the references are in a script without spaces between words ({', '.join(scripts)}), and its words "
        f"({tokenizer or own}) are what spaces separate: choose the tokenizer {suitable(texts)} (none: where spaces "
        "separate the words already)"
    )


def english_obstacle(texts: Sequence[str], what: str) -> str | None:
    """Say why what is made for English can't score texts with other letters; None where it can."""
    share = lost_letters(texts, str.isascii)
    return f"{what} for English, and {share:.0%} of the references' letters are others" if share > MOST_LOST else None
