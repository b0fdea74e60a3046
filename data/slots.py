"""Slot errors of one output."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SlotErrors:
    """The slot errors of an output.

    Attributes:
        slots: the number of slots in the meaning representation.
        missing: slots that the output doesn't state.
        wrong: slots for which it states another value, even if also the right one.
        repeated: slots that it states twice in the same words, except names and kinds of place.
        added: slots not in the meaning representation that it states, or whose placeholder was left unfilled.
    """

    slots: int
    missing: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """The number of errors; a slot counts once."""
        return len(self.missing) + len(self.wrong) + len(self.repeated) + len(self.added)
