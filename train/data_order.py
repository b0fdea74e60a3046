"""The rows of each optimiser step: they depend on the seed and the step, not on how processes share the rows."""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path

import datasets
import pyarrow.compute as pc
import torch
from torch.utils.data import Sampler
from transformers import TrainingArguments
from transformers.trainer_pt_utils import get_length_grouped_indices

from skipdecode import ConfigError

FILE_NAME = "data_order.json"


class DataOrder(Sampler[int]):
    """The rows of an epoch in the order in which steps use them, with rows of similar length together.

    accelerate hands batches to the processes in turn, and each process accumulates the gradients of its batches. So
    step s of an epoch uses the rows from s * rows_a_step on, however they are divided, as long as the order depends
    only on the seed, the epoch and `rows_a_step`: not on the batch size of a process, nor on the global random
    generator, from which each process also draws dropout.

    Every step is full: where an epoch's last step lacks rows, some are used twice.

    Args:
        lengths: length of each row in tokens.
        rows_a_step: rows of one optimiser step, over all processes.
        seed: the seed of the order.
        rows: identifies the rows, from `rows_hash`.
    """

    def __init__(self, lengths: Sequence[int], rows_a_step: int, seed: int, rows: str = "") -> None:
        self.lengths = lengths
        self.rows_a_step = rows_a_step
        self.seed = seed
        self.rows = rows
        self.epoch = 0

    def __len__(self) -> int:
        return ceil(len(self.lengths) / self.rows_a_step) * self.rows_a_step

    def start(self, step: int) -> None:
        """Select the epoch to which a step of the run (0-based) belongs."""
        self.epoch = step * self.rows_a_step // len(self)

    def __iter__(self) -> Iterator[int]:
        # A string is hashed the same on every platform and in every version of Python; an int or a tuple is not.
        seed = random.Random(f"rows:{self.seed}:{self.epoch}").getrandbits(63)
        generator = torch.Generator().manual_seed(seed)
        rows = torch.arange(len(self.lengths))
        while len(rows) < len(self):
            rows = torch.cat([rows, torch.randperm(len(self.lengths), generator=generator)])
        taken = rows[: len(self)].tolist()
        order = get_length_grouped_indices([self.lengths[row] for row in taken], self.rows_a_step, generator=generator)
        return (taken[place] for place in order)

    def save(self, checkpoint: Path) -> None:
        """Save in a checkpoint what the order depends on."""
        values = {"rows_a_step": self.rows_a_step, "rows": self.rows}
        (checkpoint / FILE_NAME).write_text(json.dumps(values) + "\n", encoding="utf-8")


def rows_hash(rows: datasets.Dataset) -> str:
    """A hash of the tokens of all rows."""
    found = hashlib.sha256()
    for batch in rows.with_format("arrow").iter(batch_size=10_000):
        for column in (batch["prompt_ids"], batch["completion_ids"]):
            for part in (pc.list_value_length(column), pc.list_flatten(column)):
                found.update(part.to_numpy().tobytes())
    return found.hexdigest()


def rows_a_step(arguments: TrainingArguments) -> int:
    """Rows of one optimiser step, over all processes."""
    rows: int = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    return rows


def check_rows(checkpoint: str, rows: datasets.Dataset) -> None:
    """Raise ConfigError where a checkpoint was trained on other rows."""
    before = json.loads(Path(checkpoint, FILE_NAME).read_text(encoding="utf-8"))
    now = rows_hash(rows)
    if before.get("rows", now) != now:  # earlier versions didn't save it
        raise ConfigError(
            f"{checkpoint} was trained on other rows: restore the original data, or start a new run with "
            "output.dir=FOLDER"
        )


def check_rows_a_step(checkpoint: str, arguments: TrainingArguments) -> None:
    """Raise ConfigError where a checkpoint's steps had another number of rows than this run's.

    The number of accumulated batches and of processes may change.
    """
    try:
        before: int = json.loads(Path(checkpoint, FILE_NAME).read_text(encoding="utf-8"))["rows_a_step"]
    except FileNotFoundError:
        raise ConfigError(
            f"{checkpoint} was written by a version with another data order: start a new run with output.dir=FOLDER"
        ) from None
    now, batch, processes = rows_a_step(arguments), arguments.train_batch_size, arguments.world_size
    if now == before:
        return
    parts, left = divmod(before, batch * processes)
    advice = f"set train.gradient_accumulation_steps={parts}"
    if left:
        advice = f"choose them so that their product is {before}"
    raise ConfigError(
        f"{checkpoint} was written with {before} rows per step, but now there are {now} (train.per_device_batch_size "
        f"{batch} x train.gradient_accumulation_steps {arguments.gradient_accumulation_steps} x processes {processes})"
        f": {advice}, or start a new run with output.dir=FOLDER"
    )
