"""Tokenization of texts for metrics."""

import re
import unicodedata
from collections.abc import Sequence

from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

_TOKENIZER = Tokenizer13a()  # type: ignore[no-untyped-call]


def words(text: str) -> list[str]:
    """The tokens of mteval-v13a, in lower case: punctuation is separated, except . and , between digits."""
    return str(_TOKENIZER(text.lower().rstrip())).split()


# Follows Stanford's tokenizer for English: contractions and currency signs are separate tokens; hyphens, numbers such
# as 20-25 or 4.50 and a period before a comma (of an abbreviation) stay in a word; other punctuation is dropped.
_PENN = re.compile(
    r"can(?=not\b)|\w+?(?=n't\b)|n't\b|(?<=\w)'(?:s|m|d|ll|re|ve)\b"
    r"|(?:\b[dlo]'|(?<!\w)-(?=\d))?\w+(?:-\w+|(?<=\d)[.,/:]\d+)*(?:\.(?=,))?|[^\w\s.,:;?!'\"`()\[\]{}-]"
)


def penn_words(text: str) -> list[str]:
    """The tokens of the Penn Treebank, in lower case, without punctuation.

    >>> penn_words("It isn't far, and costs £20-25 (a 5-star pub).")
    ['it', 'is', "n't", 'far', 'and', 'costs', '£', '20-25', 'a', '5-star', 'pub']
    """
    return _PENN.findall(text.lower().replace("’", "'"))


# Letters and signs that Unicode doesn't decompose into an ASCII character and an accent.
_ASCII = str.maketrans(
    dict.fromkeys("‐‑‒–—―−", "-") | dict.fromkeys("‘’‚", "'") | dict.fromkeys("“”„", '"')
    | {"ı": "i", "ø": "o", "ß": "ss", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "æ": "ae", "œ": "oe"}
)  # fmt: skip


def ascii_words(text: str) -> list[str]:
    """Words and single signs in lower-case ASCII, as the WebNLG challenge 2017 compares texts.

    >>> ascii_words("Jalisco-born Müller’s 18L/36R.")
    ['jalisco', '-', 'born', 'muller', "'", 's', '18l', '/', '36r', '.']
    """
    apart = unicodedata.normalize("NFKD", text.lower().translate(_ASCII))
    return re.findall(r"\w+|[^\w\s]", apart.encode("ascii", "ignore").decode())


def ngrams(text: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """The n-grams of a list of words, in order."""
    return [tuple(text[at : at + n]) for at in range(len(text) - n + 1)]
