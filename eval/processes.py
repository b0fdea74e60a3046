"""The processes that share an evaluation, and what they tell each other (docs/decisions/0008)."""

import atexit
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from skipdecode.cli.device import resolve_device
from skipdecode.errors import ConfigError, first_line

T = TypeVar("T")

_PATIENCE = timedelta(days=1)  # the others wait while the first one searches for thresholds; one that dies is noticed


@dataclass(frozen=True)
class Processes:
    """This process among those of an evaluation.

    Attributes:
        rank: its number; the first, 0, is the one that writes and speaks.
        count: how many there are.
        share_model: whether they hold one model together, each a part of every layer, and so decode every batch
            together. Else each has a model of its own, and decodes batches of its own.
    """

    rank: int = 0
    count: int = 1
    share_model: bool = False

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    @property
    def sharers(self) -> int:
        """Processes, or groups of them, among which batches are shared."""
        return 1 if self.share_model else self.count

    @property
    def share(self) -> int:
        """The number of this one among the sharers."""
        return 0 if self.share_model else self.rank

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in order, on each.

        Raises:
            ConnectionError: where another process has ended.
        """
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        try:
            dist.all_gather_object(values, value)
        except RuntimeError as error:
            raise ConnectionError(
                "another process of this evaluation has ended; the same command goes on where it was"
            ) from error
        return values

    def together(self, work: Callable[[], T]) -> T:
        """Do `work` on each process. Where one can't, the first of those raises its error, and the others end after it.

        torchrun ends every process as soon as one has failed, so none may end before the error is reported.
        """
        failure, result = None, None
        try:
            result = work()
        except (ConfigError, OSError) as error:
            if self.count == 1 or isinstance(error, ConnectionError):
                raise
            failure = error
        failed = [rank for rank, fails in enumerate(self.gather(failure is not None)) if fails]
        if failure is not None and failed[0] == self.rank:
            raise failure
        if failed:
            with suppress(ConnectionError):
                self.gather(None)  # until the one that reports has ended, and left the group
            raise SystemExit(2)
        return result  # type: ignore[return-value]

    def on_first(self, work: Callable[[], T]) -> T:
        """Do `work` on the first process, and return what it gives on each. Fails as `together` does."""
        return self.gather(self.together(lambda: work() if self.first else None))[0]  # type: ignore[return-value]

    def device(self, name: str | None) -> torch.device:
        """The device of this process: what `resolve_device` gives one that is alone, else a GPU of its own, or the CPU.

        Raises ConfigError where there are fewer GPUs than processes on this machine, and for a GPU that is named.
        """
        device = resolve_device(name)
        if self.count == 1 or device.type != "cuda":
            return device
        if device.index is not None:
            raise ConfigError(f"--device is {name!r}: each of several processes takes a GPU of its own; leave it out")
        number, there = _local_rank(), torch.cuda.device_count()
        if number >= there:
            raise ConfigError(f"there are more processes than GPUs on this machine: start {there}, one for each")
        torch.cuda.set_device(number)
        return torch.device("cuda", number)


ALONE = Processes()


def join_processes(*, share_model: bool) -> Processes:
    """This process among those that torchrun started, until it ends; alone without torchrun.

    They meet through gloo, which needs no GPU; where they share a model on GPUs its parts meet through NCCL.

    Raises ConfigError for a model that is to be shared by one process.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if share_model and count == 1:
        raise ConfigError("--tensor-parallel shares a model among processes: start them by torchrun --nproc_per_node N")
    if count == 1:
        return ALONE
    cuda = share_model and torch.cuda.is_available()
    leave_group_at_exit()
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=_PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the {count} processes that WORLD_SIZE speaks of can't meet ({first_line(error)}): start them by torchrun"
        ) from error
    return Processes(int(os.environ["RANK"]), count, share_model)


def leave_group_at_exit() -> None:
    """Leave the group of processes as this one ends: neither before that, nor while Python is taken down.

    The others fail as soon as it has left, and then torchrun ends every process: by then this one must have written
    what it failed at. And while Python is taken down, a process that ends before the first one, which still writes, may
    abort over a thread of the group's.
    """

    @atexit.register
    def leave_group() -> None:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def launcher() -> list[str]:
    """The start of the command line that started this process, as a report repeats it."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ["python"]
    machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    here = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    return ["torchrun", *(["--nnodes", str(machines)] if machines > 1 else []), "--nproc_per_node", here]


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
