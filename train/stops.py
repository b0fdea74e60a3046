"""What stops a run early: a signal, a loss that isn't finite, or a failed write."""

import signal
from collections.abc import Callable
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

    Clusters send SIGTERM before they take a machine away. All ranks stop after the same step. With several, that is the
    step after the one with the signal: each step asks whether a rank received one, and the next step reads the answer,
    so that the host doesn't wait for the step that it has just queued.
    """

    def __init__(self) -> None:
        self.received = False
        self.stopped = False  # whether a step has ended since; its checkpoint is saved
        self._before: Any = signal.SIG_DFL
        self._answer: Callable[[], bool] | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._before = signal.signal(signal.SIGTERM, self._receive)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._is_told(args.device):
            self.stopped = control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGTERM, self._before)
        self.stopped = self.stopped or _any_rank(self.received, args.device)

    def _is_told(self, device: torch.device) -> bool:
        if not torch.distributed.is_initialized():
            return self.received
        answer, self._answer = self._answer, _ask_ranks(self.received, device)
        return answer is not None and answer()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise SystemExit(128 + number)
        self.received = True


def _ask_ranks(flag: bool, device: torch.device) -> Callable[[], bool]:
    """Ask whether the flag is set on any rank; the function that is returned waits for the answer."""
    flags = torch.full((), int(flag), device=device)  # filled there, because the host would wait to copy it
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    found = flags.to("cpu", non_blocking=True)
    copied = None if device.type == "cpu" else torch.Event(device)
    if copied is not None:
        copied.record()

    def answer() -> bool:
        if copied is not None:
            copied.synchronize()
        return bool(found)

    return answer


def _any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any rank; all of them must call this together."""
    return _ask_ranks(flag, device)() if torch.distributed.is_initialized() else flag


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
