"""The order of the rows in an epoch, which a run that is resumed in its middle must find again."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices

FILE_NAME = "data_order.pt"


class DataOrder(LengthGroupedSampler):
    """Batches of rows of like length, in an order that is drawn from torch's generator when an epoch starts.

    The Trainer draws it anew when it resumes in the middle of an epoch, from the generator as it is then; the first
    epoch alone comes out the same. Here the generator's state at the start of the epoch goes into the checkpoint.
    """

    epoch_start: torch.Tensor | None = None  # the state that the epoch at hand was drawn from
    resumed: torch.Tensor | None = None  # the state that the next epoch is to be drawn from

    def __iter__(self) -> Iterator[int]:
        generator = None
        if self.resumed is not None:
            generator = torch.Generator()
            generator.set_state(self.resumed)
        self.epoch_start = torch.get_rng_state() if self.resumed is None else self.resumed
        self.resumed = None
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=generator))

    def save(self, checkpoint: Path) -> None:
        """Write the state of the epoch at hand into a checkpoint."""
        if self.epoch_start is not None:
            torch.save(self.epoch_start, checkpoint / FILE_NAME)

    def load(self, checkpoint: Path) -> None:
        """Go on as a checkpoint did, unless it was written where an epoch ended: the next one starts as always."""
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        if not float(state["epoch"]).is_integer() and (checkpoint / FILE_NAME).exists():
            self.resumed = torch.load(checkpoint / FILE_NAME, weights_only=True)
