"""What is counted of a text that must state slots."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SlotErrors:
    """Faults of a text, slot by slot.

    Attributes:
        slots: how many the meaning representation has.
        missing: slots that the text doesn't state.
        wrong: slots of which it states another value, be it beside the right one.
        repeated: slots that it states twice in the same words; but names and kinds of place are what a text goes by.
        added: slots that aren't there, of which it states a value, or has a placeholder that nothing was put back for.
    """

    slots: int
    missing: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """All of them; a slot counts once."""
        return len(self.missing) + len(self.wrong) + len(self.repeated) + len(self.added)
