"""Tokenizers of sacrebleu that can replace the metrics' own, and the languages that need one.

By default BLEU, NIST and METEOR use mteval's 13a tokens, ROUGE those of rouge-score, CIDEr those of the Penn Treebank.
They are designed for English; the functions below detect references that need another tokenizer.
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

# Scripts without spaces between words.
UNSPACED = (
    *("Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan", "Yi"),
    *("Javanese", "Balinese", "Tai_Le", "New_Tai_Lue", "Tai_Tham", "Tai_Viet"),
)
Tokenizer: TypeAlias = Literal["13a", "intl", "zh", "ja-mecab", "ko-mecab", "flores101", "flores200", "char", "none"]
# Tokenizer -> the scripts without spaces whose words (or characters) it separates.
TOKENIZERS: dict[str, tuple[str, ...]] = {
    "13a": (),
    "intl": (),
    "zh": ("Han",),
    "ja-mecab": ("Han", "Hiragana", "Katakana"),
    "ko-mecab": (),
    "flores101": UNSPACED,
    "flores200": UNSPACED,
    "char": UNSPACED,
    "none": UNSPACED,  # for texts that are already tokenized
}
_PACKAGES = {
    "ja-mecab": "'sacrebleu[ja]'",
    "ko-mecab": "'sacrebleu[ko]'",
    "flores101": "sentencepiece",
    "flores200": "sentencepiece",
}
_DOWNLOAD_TIMEOUT = 30.0  # seconds; sacrebleu itself has no timeout
# If a metric's tokens lose a larger fraction of the letters, its score isn't meaningful. English texts are far below,
# even with accented names (E2E: 0.2 %).
MAX_LOST = 0.1

_UNSPACED_LETTERS = {script: regex.compile(rf"(?=\p{{L}})\p{{Script={script}}}") for script in UNSPACED}


def check_tokenizer(name: str | None) -> None:
    """Raise ConfigError for an unknown tokenizer."""
    if name is not None and name not in TOKENIZERS:
        raise unknown("tokenizer", name, TOKENIZERS)


@lru_cache(maxsize=1)
def load_tokenizer(name: str) -> BLEU:
    """A BLEU scorer of sacrebleu, whose attribute `tokenizer` is the tokenizer of that name.

    Raises ConfigError for an unknown tokenizer, and where a package or model that it needs is missing.
    """
    check_tokenizer(name)
    try:
        with _timeout(_DOWNLOAD_TIMEOUT):
            return BLEU(tokenize=name, lowercase=True, effective_order=True)
    except OSError as error:
        folder = sacrebleu.utils.SACREBLEU_DIR
        raise ConfigError(
            f"the tokenizer {name!r} needs a model that sacrebleu downloads into {folder}/models, but the "
            f"download failed: {first_line(error)}"
        ) from error
    # sacrebleu exits where the certificate of a server is unknown.
    except (ImportError, RuntimeError, AssertionError, SystemExit) as error:
        raise ConfigError(
            f"the tokenizer {name!r} needs a package that is missing or doesn't work: pip install "
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
    """A function that splits a text into lower-case words: a tokenizer of sacrebleu, by default the metric's own."""
    if tokenizer is None:
        return own
    split = load_tokenizer(tokenizer).tokenizer
    return lambda text: str(split(text.lower().rstrip())).split()


def without_punctuation(words: Sequence[str]) -> list[str]:
    """The words that don't consist of punctuation (and the word-start mark of sentencepiece) only.

    >>> without_punctuation(["«", "да", "»", "👍", "▁。"])
    ['да', '👍']
    """
    return [
        word
        for word in words
        if not all(character == "▁" or unicodedata.category(character)[0] == "P" for character in word)
    ]


def signature(tokenizer: str) -> str:
    """The signature of a tokenizer in sacrebleu, with its version where it has one."""
    return str(load_tokenizer(tokenizer).tokenizer.signature())


def lost_letters(texts: Sequence[str], kept: Callable[[str], bool]) -> float:
    """The fraction of letters that a metric's tokens lose; 0 for texts without letters.

    Args:
        texts: the texts.
        kept: whether a letter is kept; called for non-ASCII letters only.
    """
    lost = sum(
        letter.isalpha() and not kept(letter) for text in texts if not text.isascii() for letter in text if letter > "~"
    )
    return lost / _letters(texts) if lost else 0.0


def unspaced(texts: Sequence[str], tokenizer: str | None = None) -> list[str]:
    """The scripts of texts whose words neither spaces nor the tokenizer separate; empty if few letters are in them."""
    separated = TOKENIZERS[tokenizer] if tokenizer is not None else ()
    found = {
        script: sum(len(letter.findall(text)) for text in texts if not text.isascii())
        for script, letter in _UNSPACED_LETTERS.items()
        if script not in separated
    }
    count = sum(found.values())
    if not count or count / _letters(texts) <= MAX_LOST:
        return []
    return sorted(filter(found.__getitem__, found), key=lambda script: -found[script])


def _letters(texts: Sequence[str]) -> int:
    return sum(sum(map(str.isalpha, text)) for text in texts)


def suitable(texts: Sequence[str]) -> str:
    """The tokenizers suitable for the scripts of texts, for messages.

    >>> suitable(["Привет, мир"]), suitable(["你好"])
    ('intl', 'zh, flores200 or char')
    """
    scripts = set(unspaced(texts))
    if not scripts:
        return "intl"
    fitting = [name for name in ("zh", "ja-mecab") if scripts <= set(TOKENIZERS[name])][:1]
    return f"{', '.join([*fitting, 'flores200'])} or char"


def unspaced_obstacle(texts: Sequence[str], tokenizer: str | None, own: str) -> str | None:
    """The reason why a metric can't count the words of texts without spaces; None where it can.

    Args:
        texts: the references.
        tokenizer: the tokenizer; None: the metric's own.
        own: the name of the metric's own tokenizer.
    """
    scripts = unspaced(texts, tokenizer)
    if not scripts:
        return None
    return (
        f"the references are in a script without spaces between words ({', '.join(scripts)}), but its tokens "
        f"({tokenizer or own}) are separated by spaces: choose the tokenizer {suitable(texts)} (none: for texts that "
        "are already tokenized)"
    )


def english_obstacle(texts: Sequence[str], what: str) -> str | None:
    """The reason why a metric for English can't score texts with other letters; None where it can."""
    share = lost_letters(texts, str.isascii)
    return f"{what} for English, but {share:.0%} of the references' letters aren't" if share > MAX_LOST else None
