"""What stops a run early: a signal, a loss that isn't finite, or a failed write."""

import signal
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class RunStopped(Exception):
    """Raised where a run can't continue.

    Args:
        message: one line with the reason and how to continue.
        status: exit status of the command.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class StopOnSignal(TrainerCallback):
    """On SIGTERM, saves a checkpoint at the end of the step and stops; a second signal stops at once.

    Clusters send SIGTERM before they take a machine away. All ranks stop after the same step.
    """

    def __init__(self) -> None:
        self.received = False
        self.stopped = False  # whether a step has ended since; its checkpoint is saved
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
    """Whether the flag is set on any rank."""
    if not torch.distributed.is_initialized():
        return flag
    flags = torch.tensor(int(flag), device=device)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    return bool(flags.item())


class FiniteLoss:
    """Detects infinite or NaN losses and gradients, without waiting for the device in each step."""

    def __init__(self) -> None:
        self._finite: torch.Tensor | None = None

    def watch(self, loss: torch.Tensor) -> None:
        """Add a batch's loss, or the norm of a gradient."""
        finite = torch.isfinite(loss.detach())
        self._finite = finite if self._finite is None else self._finite & finite

    def broken(self, device: torch.device) -> bool:
        """Whether any value on any rank wasn't finite; all ranks must call this together."""
        return _any_rank(self._finite is not None and not bool(self._finite), device)
