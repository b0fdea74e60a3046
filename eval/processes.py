"""The processes of a distributed evaluation and their communication (docs/decisions/0008)."""

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

_TIMEOUT = timedelta(
    days=1
)  # long, since the others wait for calibration on the first; a dead process is noticed at once


@dataclass(frozen=True)
class Processes:
    """The rank of this process in an evaluation.

    Attributes:
        rank: the rank of this process; rank 0 writes files and prints.
        count: the number of processes.
        share_model: whether the processes hold one model together (tensor parallelism) and decode every batch together;
            otherwise each has its own copy and decodes its own batches.
    """

    rank: int = 0
    count: int = 1
    share_model: bool = False

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def sharers(self) -> int:
        """The number of processes, or groups of processes, that batches are distributed over."""
        return 1 if self.share_model else self.count

    @property
    def share(self) -> int:
        """The index of this process or group among `sharers`."""
        return 0 if self.share_model else self.rank

    def gather(self, value: T) -> list[T]:
        """The values of all processes in order of rank, on every process.

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
                "another process of this evaluation has ended; run the same command again to continue"
            ) from error
        return values

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every process. If it fails, the lowest failing rank raises its error and the others exit later.

        torchrun terminates all processes as soon as one has failed, so none may exit before the error is printed.
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
                self.gather(None)  # waits until the reporting process has left the group
            raise SystemExit(2)
        return result  # type: ignore[return-value]

    def on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first process and return its result on every process. Fails as `together` does."""
        return self.gather(self.together(lambda: work() if self.first else None))[0]  # type: ignore[return-value]

    def device(self, name: str | None) -> torch.device:
        """The device of this process: that of `resolve_device` for a single process, else its own GPU, or the CPU.

        Raises ConfigError where there are fewer GPUs than processes on this machine, and where several processes are
        given one GPU.
        """
        device = resolve_device(name)
        if self.count == 1 or device.type != "cuda":
            return device
        if device.index is not None:
            raise ConfigError(
                f"--device is {name!r}: with several processes each takes its own GPU; leave --device out"
            )
        local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= gpus:
            raise ConfigError(f"there are more processes than GPUs on this machine: start {gpus}, one per GPU")
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)


ALONE = Processes()


def join_processes(*, share_model: bool) -> Processes:
    """Join the process group that torchrun started; ALONE without torchrun.

    The group uses gloo, which needs no GPU; a model shared on GPUs uses NCCL.

    Raises ConfigError for a shared model with a single process.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if share_model and count == 1:
        raise ConfigError("--tensor-parallel needs several processes: start them with torchrun --nproc_per_node N")
    if count == 1:
        return ALONE
    cuda = share_model and torch.cuda.is_available()
    leave_group_at_exit()
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=_TIMEOUT)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the process group of WORLD_SIZE={count} can't be initialized ({first_line(error)}): use torchrun"
        ) from error
    return Processes(int(os.environ["RANK"]), count, share_model)


def leave_group_at_exit() -> None:
    """Leave the process group at exit: neither earlier, nor during interpreter shutdown.

    Once this process has left, the others fail and torchrun terminates all of them, so its error must have been printed
    by then. During interpreter shutdown, a thread of the group may abort a process while rank 0 still writes.
    """

    @atexit.register
    def leave_group() -> None:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def launcher() -> list[str]:
    """The start of the command line of this process, for the report."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ["python"]
    machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    per_node = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    return ["torchrun", *(["--nnodes", str(machines)] if machines > 1 else []), "--nproc_per_node", per_node]
