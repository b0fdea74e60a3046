"""What a token stands for in a text: its bytes, and a name for it."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

# The bytes that the letters of a byte-level vocabulary stand for.
_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}


class Spelling:
    """Spells the tokens of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Tokens are decoded behind a known one: some tokenizers drop the space before a first word.
        self._known: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._known_text = self._decode(self._known)

    def raw(self, token: int, *, first: bool = False) -> bytes:
        """What a token adds to a text, of which it may be the first. Special tokens add nothing."""
        text = self._decode([token]) if first else self._decode([*self._known, token])[len(self._known_text) :]
        if "\ufffd" in text:  # a part of a character
            piece = self._tokenizer.convert_ids_to_tokens(token)
            if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):
                return bytes.fromhex(byte[1])
            if _BYTES.keys() >= set(piece):
                return bytes(_BYTES[letter] for letter in piece)
        return text.encode()

    def name(self, token: int, raw: bytes) -> str:
        """The characters of what a token adds; where they aren't whole its bytes, as OpenAI writes them."""
        try:
            return raw.decode() or str(self._tokenizer.decode([token]))
        except UnicodeDecodeError:
            return f"bytes:{str(raw)[2:-1]}"

    def first(self, tokens: Iterable[int]) -> float:
        """Where the first one stands that isn't special; behind all where there is none."""
        return next((place for place, token in enumerate(tokens) if self.raw(token)), math.inf)

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
