"""A text as the words that the metrics count."""

import re
import unicodedata
from collections.abc import Sequence

from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

_TOKENIZER = Tokenizer13a()  # type: ignore[no-untyped-call]


def words(text: str) -> list[str]:
    """The tokens of mteval-v13a, in lower case: punctuation apart, but for . and , between digits."""
    return str(_TOKENIZER(text.lower().rstrip())).split()


# As Stanford's tokenizer parts English: contractions and signs of money apart; hyphens, numbers such as 20-25 or 4.50
# and a point before a comma, which is an abbreviation's, within a word; other punctuation is left out.
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


# Letters and signs that Unicode doesn't take apart into an ASCII one and an accent.
_ASCII = str.maketrans(
    dict.fromkeys("‐‑‒–—―−", "-") | dict.fromkeys("‘’‚", "'") | dict.fromkeys("“”„", '"')
    | {"ı": "i", "ø": "o", "ß": "ss", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "æ": "ae", "œ": "oe"}
)  # fmt: skip


def ascii_words(text: str) -> list[str]:
    """Words and single signs in lower case and in ASCII, as the WebNLG challenge of 2017 compares texts.

    >>> ascii_words("Jalisco-born Müller’s 18L/36R.")
    ['jalisco', '-', 'born', 'muller', "'", 's', '18l', '/', '36r', '.']
    """
    apart = unicodedata.normalize("NFKD", text.lower().translate(_ASCII))
    return re.findall(r"\w+|[^\w\s]", apart.encode("ascii", "ignore").decode())


def ngrams(text: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """The n-grams of words, in order."""
    return [tuple(text[at : at + n]) for at in range(len(text) - n + 1)]
