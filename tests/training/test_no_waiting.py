"""A training step never makes the host wait for the device, so that a GPU always has work queued.

There is no GPU here: what would wait is found by its operators, and by the methods of tensors that aren't operators.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny_opt
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import skipdecode
import train
from skipdecode import SkipSchedule
from skipdecode.training import Objective
from train.stops import StopOnSignal
from train.trainer import SkipTrainer

LAYERS = 3
OURS = tuple(str(Path(str(package.__file__)).parent) for package in (skipdecode, train))
# The values that these read are on the host; transformers looks once a pass whether a batch has padding.
ALLOWED = ("/torch/utils/data/", "/transformers/masking_utils.py")
READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "repeat_interleave.Tensor")
METHODS = ("tolist", "cpu", "numpy")

STEP = SkipSchedule(LAYERS, 3, 1, horizon=4, prompt="max")
LOW = SkipSchedule(LAYERS, 2, 1, horizon=5)
FULL = SkipSchedule.full_depth(LAYERS)
RECIPES: dict[str, dict[str, Any]] = {
    "one schedule a step": {"schedules": [FULL, STEP, LOW]},
    "all in each step, weighted by depth": {
        "schedules": [FULL, STEP, LOW],
        "sampling": "all",
        "objective": Objective(-0.5, 0.1, 0.5),
    },
    "full depth teaches": {"schedules": [STEP, LOW], "objective": Objective(distillation=0.5)},
    "a frozen teacher": {
        "schedules": [FULL, LOW],
        "teacher": True,
        "objective": Objective(distillation=1, frozen_teacher=True),
    },
    "exits": {"schedules": [FULL], "objective": Objective(1.0, distillation=0.5, exits=True)},
    "rotating exits with layer dropout": {
        "schedules": [FULL],
        "layer_dropout": 0.5,
        "objective": Objective(exits=True, exit_every=2),
    },
}


class Waiting(TorchDispatchMode):
    """Raises AssertionError where the host would wait for a device, while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False

    def check(self, what: str, ours: bool = False) -> None:
        """`ours`: only where the project's own code asks for it, not an optimiser of torch or transformers' Trainer."""
        if not self.on:
            return
        files, frame = [], sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.endswith("/transformers/trainer.py"):
            files.append(frame.f_code.co_filename)  # innermost first
            frame = frame.f_back
        if any(part in file for file in files for part in ALLOWED):
            return
        asking = next((file for file in files if "/torch/" not in file and file != __file__), "")
        if not ours or asking.startswith(OURS):
            raise AssertionError(f"{what} makes the host wait for the device")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if name.startswith(READS):
            self.check(name)
        if name.startswith(("index.", "index_put")) and any(_is_mask(each) for each in args[1] or ()):
            self.check("an index by a mask")
        if name.startswith("lift_fresh"):  # torch.tensor and new_tensor: values of the host that a device gets
            self.check("a copy from the host", ours=True)
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    mode = Waiting()

    def checked(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            mode.check(name)
            return original(tensor, *args, **kwargs)

        return method

    for name in METHODS:
        monkeypatch.setattr(torch.Tensor, name, checked(name, getattr(torch.Tensor, name)))
    with mode:
        yield mode


class BetweenLogs(TrainerCallback):
    """Watches training, but for the logs, where values are read."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._waiting.on = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._waiting.on = not control.should_log

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._waiting.on = not control.should_training_stop


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_reads_no_value_of_the_device(recipe: str, waiting: Waiting, tmp_path: Path) -> None:
    """Two steps, of which the second one is logged."""
    settings = dict(RECIPES[recipe])
    if settings.pop("teacher", False):
        settings["teacher"] = tiny_opt.__wrapped__("opt", 2, seed=1)
    generator = torch.Generator().manual_seed(0)

    def tokens() -> list[int]:
        length = int(torch.randint(2, 9, (), generator=generator))
        return torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()

    rows = [{"prompt_ids": tokens(), "completion_ids": tokens()} for _ in range(6)]
    usual: dict[str, Any] = {"use_cpu": True, "logging_nan_inf_filter": False, "save_strategy": "no", "report_to": []}
    trainer = SkipTrainer(
        model=tiny_opt.__wrapped__("opt", LAYERS),
        args=TrainingArguments(str(tmp_path), max_steps=2, logging_steps=2, per_device_train_batch_size=3, **usual),
        train_dataset=rows,
        callbacks=[BetweenLogs(waiting)],
        **settings,
    )
    trainer.train()
    assert [line["step"] for line in trainer.state.log_history if "layers_per_token" in line] == [2]


def test_what_would_wait_is_found(waiting: Waiting) -> None:
    values, mask = torch.arange(4.0), torch.tensor([True, False, True, True])
    waiting.on = True
    for read in (values.tolist, values.sum().item, lambda: bool(mask[0]), lambda: values[mask], mask.nonzero):
        with pytest.raises(AssertionError, match="wait"):
            read()


def test_of_several_processes_all_stop_one_step_after_a_signal_or_after_the_last_step(tmp_path: Path) -> None:
    """So that a step doesn't wait for the answer of the other processes."""
    args, state = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]), TrainerState()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        stop, last, told = StopOnSignal(), StopOnSignal(), []
        for received in (False, True, True):
            stop.received = received
            stop.on_step_end(args, state, control := TrainerControl())
            told.append(control.should_training_stop)
        last.on_train_begin(args, state, TrainerControl())
        last.received = True
        last.on_train_end(args, state, TrainerControl())
    finally:
        torch.distributed.destroy_process_group()
    assert told == [False, False, True]
    assert last.stopped
