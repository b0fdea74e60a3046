"""Incremental detokenization, up to a stop string."""

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # stands for the first bytes of a character whose other bytes are missing


class Detokenizer:
    """Decodes the tokens of one sequence as they are generated, up to the first of `stops`, which isn't in the text.

    Attributes:
        text: the text so far, without an end that may be the beginning of a stop.
        stopped: whether a stop was found.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._tokens: list[int] = []
        # New tokens are decoded together with the ones before them that last gave text, as some tokenizers drop the
        # space before a first word. Those begin at `_start`, end at `_end`, and give the text `_context`.
        self._start, self._end, self._context = 0, 0, ""
        self._decoded = ""  # including any stop
        self.text = ""
        self.stopped = False

    def add(self, tokens: Sequence[int], *, last: bool) -> str:
        """Add the next tokens, possibly the `last`. Returns the new text, empty while more tokens must decide on it."""
        for place, token in enumerate(tokens, 1):
            self._grow(token, last=last and place == len(tokens))
        at = min((found for stop in self._stops if (found := self._decoded.find(stop)) >= 0), default=None)
        if at is not None:
            self.stopped, text = True, self._decoded[:at]
        else:
            text = self._decoded[: len(self._decoded) - (0 if last else self._held_back())]
        new = text[len(self.text) :]
        self.text = text
        return new

    @property
    def decoded_length(self) -> int:
        """Number of characters so far, those of a stop or of its possible beginning included."""
        return len(self._decoded)

    def _grow(self, token: int, *, last: bool) -> None:
        self._tokens.append(token)
        text = self._decode(self._tokens[self._start :])
        if text.endswith(_INCOMPLETE) and not last:
            return
        if not text.startswith(self._context):  # with some tokenizers, invalid bytes change the characters before them
            self._start, self._context = self._end, ""
            text = self._decode(self._tokens[self._start :])
        if new := text[len(self._context) :]:
            self._decoded += new
            self._start, self._end = self._end, len(self._tokens)
            self._context = self._decode(self._tokens[self._start :])

    def _held_back(self) -> int:
        """The length of the longest end of the text with which a stop may begin."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        return next(
            (
                n
                for n in range(min(longest, len(self._decoded)), 0, -1)
                if any(stop.startswith(self._decoded[-n:]) for stop in self._stops)
            ),
            0,
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
