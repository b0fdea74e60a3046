"""Text from tokens as they come, up to what ends it."""

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # what a tokenizer makes of the first bytes of a character


class Words:
    """The text of one answer, whose tokens come one after another.

    Args:
        tokenizer: of the model.
        stops: texts that end the answer, and are no part of it.

    Attributes:
        text: so far, without what may be the beginning of a stop.
        stopped: whether a stop has come.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._tokens: list[int] = []
        # Tokens are decoded behind the last that made text: some tokenizers drop the space before a first word.
        self._from, self._read, self._known = 0, 0, ""
        self._whole = ""
        self.text = ""
        self.stopped = False

    def add(self, tokens: Sequence[int], *, last: bool) -> str:
        """Take tokens. Returns what the text grows by, which may be nothing until more is known."""
        for place, token in enumerate(tokens, 1):
            self._grow(token, last=last and place == len(tokens))
        at = min((found for stop in self._stops if (found := self._whole.find(stop)) >= 0), default=None)
        if at is not None:
            self.stopped, shown = True, self._whole[:at]
        else:
            shown = self._whole[: len(self._whole) - (0 if last else self._held_back())]
        new = shown[len(self.text) :]
        self.text = shown
        return new

    @property
    def decided(self) -> int:
        """Characters so far, with those of a stop and of what may be its beginning."""
        return len(self._whole)

    def _grow(self, token: int, *, last: bool) -> None:
        self._tokens.append(token)
        behind = self._decode(self._tokens[self._from :])
        if behind.endswith(_UNFINISHED) and not last:
            return
        if not behind.startswith(self._known):  # some tokenizers spoil the characters before broken bytes, too
            self._from, self._known = self._read, ""
            behind = self._decode(self._tokens[self._from :])
        if new := behind[len(self._known) :]:
            self._whole += new
            self._from, self._read = self._read, len(self._tokens)
            self._known = self._decode(self._tokens[self._from :])

    def _held_back(self) -> int:
        """Characters at the end that a stop may begin with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        return next(
            (
                n
                for n in range(min(longest, len(self._whole)), 0, -1)
                if any(stop.startswith(self._whole[-n:]) for stop in self._stops)
            ),
            0,
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
