"""The rows of each optimiser step: a function of the seed and the step, however processes share the rows."""

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
    """The rows of an epoch in the order in which its steps take them, rows of like length together.

    accelerate deals batches out to the processes in turn, and each process accumulates the gradients of as many as a
    step has parts. So an epoch's step s has the rows at s * rows_a_step and after, in whatever parts, as long as the
    order itself knows of nothing but `rows_a_step`: not of a process's batch, nor of the state of a generator, from
    which each process draws its own dropout and which a run that is resumed would have to find again.

    Every step is full. Where the rows don't fill an epoch's last step, some are drawn a second time; on several
    processes accelerate would do the same, and on one leave that step smaller.

    Args:
        lengths: of all rows, in tokens.
        rows_a_step: of all processes together.
        rows: what tells them from others, as `rows_hash` gives it.
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
        """Draw the order of the epoch that a step (0-based, of the whole run) belongs to."""
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
        """Write into a checkpoint what its steps depend on."""
        values = {"rows_a_step": self.rows_a_step, "rows": self.rows}
        (checkpoint / FILE_NAME).write_text(json.dumps(values) + "\n", encoding="utf-8")


def rows_hash(rows: datasets.Dataset) -> str:
    """Of the tokens of all rows."""
    found = hashlib.sha256()
    for batch in rows.with_format("arrow").iter(batch_size=10_000):
        for column in (batch["prompt_ids"], batch["completion_ids"]):
            for part in (pc.list_value_length(column), pc.list_flatten(column)):
                found.update(part.to_numpy().tobytes())
    return found.hexdigest()


def rows_a_step(arguments: TrainingArguments) -> int:
    """Rows of an optimiser step, of all processes together."""
    rows: int = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    return rows


def check_rows(checkpoint: str, rows: datasets.Dataset) -> None:
    """Raise ConfigError where a checkpoint was trained on other rows."""
    before = json.loads(Path(checkpoint, FILE_NAME).read_text(encoding="utf-8"))
    now = rows_hash(rows)
    if before.get("rows", now) != now:  # earlier versions didn't keep it
        raise ConfigError(
            f"{checkpoint} was trained on other rows: bring back the data that they came from, or start anew with "
            "output.dir=FOLDER"
        )


def check_rows_a_step(checkpoint: str, arguments: TrainingArguments) -> None:
    """Raise ConfigError where a checkpoint's steps had another number of rows than those that would follow it.

    How a step is divided may change: into parts, or between processes.
    """
    try:
        before: int = json.loads(Path(checkpoint, FILE_NAME).read_text(encoding="utf-8"))["rows_a_step"]
    except FileNotFoundError:
        raise ConfigError(
            f"{checkpoint} was written by a version that drew rows in another order: start anew with output.dir=FOLDER"
        ) from None
    now, batch, processes = rows_a_step(arguments), arguments.train_batch_size, arguments.world_size
    if now == before:
        return
    parts, left = divmod(before, batch * processes)
    advice = f"set train.gradient_accumulation_steps={parts}"
    if left:
        advice = f"let the product of these be {before}"
    raise ConfigError(
        f"{checkpoint} was written with {before} rows a step, and there are {now} (train.per_device_batch_size {batch} "
        f"x train.gradient_accumulation_steps {arguments.gradient_accumulation_steps} x processes {processes}): "
        f"{advice}, or start anew with output.dir=FOLDER"
    )
