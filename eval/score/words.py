"""A text as the words that the metrics count."""

from collections.abc import Sequence

from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

_TOKENIZER = Tokenizer13a()  # type: ignore[no-untyped-call]


def words(text: str) -> list[str]:
    """The tokens of mteval-v13a, in lower case: punctuation apart, but for . and , between digits."""
    return str(_TOKENIZER(text.lower().rstrip())).split()


def ngrams(text: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """The n-grams of words, in order."""
    return [tuple(text[at : at + n]) for at in range(len(text) - n + 1)]
