"""A step has the same rows however processes share them, in every epoch and in a resumed run."""

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DataLoader

from skipdecode import ConfigError
from train.data_order import DataOrder, check_rows_a_step

ROWS_A_STEP = 8
# (rows per batch, accumulated batches, processes)
LAYOUTS = [(8, 1, 1), (4, 2, 1), (1, 8, 1), (4, 1, 2), (2, 2, 2), (2, 1, 4), (1, 2, 4)]


def lengths_of(rows: int) -> list[int]:
    draw = random.Random(rows)
    return [draw.randint(1, 50) for _ in range(rows)]


def steps(order: DataOrder, layout: tuple[int, int, int], done: int = 0) -> list[list[int]]:
    """The rows of each remaining step of an epoch, as accelerate divides them among the processes."""
    batch, parts, processes = layout
    taken: list[list[int]] = [[] for _ in range(len(order) // ROWS_A_STEP - done)]
    for rank in range(processes):
        shard = BatchSamplerShard(BatchSampler(order, batch, drop_last=False), processes, rank)
        loader: Any = DataLoader(range(len(order)), batch_sampler=shard, collate_fn=list)  # type: ignore[arg-type]
        for number, rows in enumerate(skip_first_batches(loader, done * parts)):
            torch.rand(rank + 1)  # as dropout would, differently in each process
            taken[number // parts] += rows
    return taken


@pytest.mark.parametrize("layout", LAYOUTS)
# More than one megabatch of 50 steps, full steps, a partial last step, and less than one step.
@pytest.mark.parametrize("rows", [450, 96, 37, 3])
def test_a_step_has_the_same_rows_however_they_are_divided(rows: int, layout: tuple[int, int, int]) -> None:
    mine, alone = (DataOrder(lengths_of(rows), ROWS_A_STEP, seed=5) for _ in range(2))
    epoch = len(alone) // ROWS_A_STEP
    orders = []
    for number in range(3):
        mine.start(number * epoch)
        alone.start(number * epoch)
        whole = list(alone)
        expected = [sorted(whole[start : start + ROWS_A_STEP]) for start in range(0, len(whole), ROWS_A_STEP)]
        assert [sorted(step) for step in steps(mine, layout)] == expected
        orders.append(expected)
        # A run that resumes after the first step of this epoch has the same rows.
        mine.start(number * epoch + min(1, epoch - 1))
        assert [sorted(step) for step in steps(mine, layout, done=1)] == expected[1:]
    assert rows == 3 or orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("rows", [450, 37, 3])
def test_an_epoch_has_every_row_and_fills_its_last_step_with_repeated_rows(rows: int) -> None:
    order = DataOrder(lengths_of(rows), ROWS_A_STEP, seed=0)
    counts = Counter(order)
    assert set(counts) == set(range(rows))
    assert len(order) == counts.total() == -(-rows // ROWS_A_STEP) * ROWS_A_STEP
    assert max(counts.values()) - min(counts.values()) <= 1


def test_rows_of_a_step_have_similar_lengths_and_depend_on_the_seed() -> None:
    lengths = lengths_of(800)
    order = DataOrder(lengths, ROWS_A_STEP, seed=0)
    found = [[lengths[row] for row in step] for step in steps(order, LAYOUTS[0])]
    spreads = [max(step) - min(step) for step in found]
    assert sum(spreads) / len(spreads) < 5  # for randomly drawn rows it is 39
    assert list(DataOrder(lengths, ROWS_A_STEP, seed=1)) != list(order)


def divided(batch: int, parts: int, processes: int) -> Any:
    return SimpleNamespace(train_batch_size=batch, gradient_accumulation_steps=parts, world_size=processes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_may_continue_with_its_steps_divided_differently(layout: tuple[int, int, int], tmp_path: Any) -> None:
    DataOrder([1], ROWS_A_STEP, seed=0).save(tmp_path)
    check_rows_a_step(str(tmp_path), divided(*layout))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ((4, 1, 1), "with 8 rows per step, but now there are 4 .* set train.gradient_accumulation_steps=2, or"),
        ((2, 2, 1), "size 2 x train.gradient_accumulation_steps 2 x processes 1.: set .*_steps=4, or"),
        ((3, 1, 2), "there are 6 .* choose them so that their product is 8, or start a new run"),
        ((16, 1, 1), "there are 16 .* choose them so that their product is 8, or start a new run"),
    ],
)
def test_continuing_with_another_number_of_rows_per_step_is_refused(
    layout: tuple[int, int, int], message: str, tmp_path: Any
) -> None:
    DataOrder([1], ROWS_A_STEP, seed=0).save(tmp_path)
    with pytest.raises(ConfigError, match=message):
        check_rows_a_step(str(tmp_path), divided(*layout))


def test_a_checkpoint_without_its_number_of_rows_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="by a version with another data order: start a new run"):
        check_rows_a_step(str(tmp_path), divided(8, 1, 1))
