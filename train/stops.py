"""Ends of a run before its time: by a signal, by a loss that isn't finite, by a full disk."""

import signal
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class RunStopped(Exception):
    """The run can't go on; the message is one line that says why, and what is left of it.

    Args:
        message: the line.
        status: the exit status of the command.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class StopOnSignal(TrainerCallback):
    """On SIGTERM, as a cluster sends it before it takes a machine away: a checkpoint at the end of the step, and stop.

    All ranks stop after the same step. A second signal stops at once.
    """

    def __init__(self) -> None:
        self.received = False
        self.stopped = False  # a step has ended since, and its checkpoint is written
        self._before: Any = signal.SIG_DFL

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._before = signal.signal(signal.SIGTERM, self._receive)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if _any_rank(self.received, args.device):
            self.stopped = control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise SystemExit(128 + number)
        self.received = True


def _any_rank(flag: bool, device: torch.device) -> bool:
    """Say whether the flag is set on one rank at least."""
    if not torch.distributed.is_initialized():
        return flag
    flags = torch.tensor(int(flag), device=device)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    return bool(flags.item())


class FiniteLoss:
    """Watches for a loss or a gradient that is infinite or no number, without a wait for the device in each step."""

    def __init__(self) -> None:
        self._finite: torch.Tensor | None = None

    def watch(self, loss: torch.Tensor) -> None:
        """Take note of a batch's loss, or of a gradient's norm."""
        finite = torch.isfinite(loss.detach())
        self._finite = finite if self._finite is None else self._finite & finite

    def broken(self, device: torch.device) -> bool:
        """Say whether one of any rank was not finite; to be asked on all ranks together."""
        return _any_rank(self._finite is not None and not bool(self._finite), device)
