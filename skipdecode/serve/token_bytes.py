"""The bytes that a token adds to a text, and its name in responses."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

# The bytes that the characters of a byte-level vocabulary stand for.
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


class TokenBytes:
    """The bytes and names of a tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Tokens are decoded after these, as some tokenizers drop the space before a first word.
        self._before: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._before_text = self._decode(self._before)

    def added(self, token: int, *, first: bool = False) -> bytes:
        """The bytes that a token adds to a text, which may begin with it. Special tokens add none."""
        text = self._decode([token]) if first else self._decode([*self._before, token])[len(self._before_text) :]
        if "\ufffd" in text:  # part of a character
            piece = self._tokenizer.convert_ids_to_tokens(token)
            if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):
                return bytes.fromhex(byte[1])
            if _BYTES.keys() >= set(piece):
                return bytes(_BYTES[character] for character in piece)
        return text.encode()

    def name(self, token: int, raw: bytes) -> str:
        """The token's characters, given its bytes; for an incomplete character, its bytes as OpenAI writes them."""
        try:
            return raw.decode() or str(self._tokenizer.decode([token]))
        except UnicodeDecodeError:
            return f"bytes:{str(raw)[2:-1]}"

    def first(self, tokens: Iterable[int]) -> float:
        """The index of the first token that adds bytes; infinity if there is none."""
        return next((place for place, token in enumerate(tokens) if self.added(token)), math.inf)

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
