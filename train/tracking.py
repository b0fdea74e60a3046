"""The metrics of a run, in files in its folder."""

import json
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from skipdecode.files import read_lines, write_atomically

METRICS_FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"


class MetricsFile(TrainerCallback):
    """Appends each logged step to `metrics.jsonl` and each validation to `validation.jsonl`.

    Every line is written to disk at once, so that a killed run loses no logged step.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        state.compute_steps(args, state.max_steps)  # the recipe's settings replace those of the checkpoint
        for path in (self.folder / METRICS_FILE, self.folder / VALIDATION_FILE):
            if state.is_world_process_zero and path.exists():
                # A resumed run repeats the steps after its checkpoint.
                kept = [
                    line for line in read_lines(path) if _step_of(line) <= state.global_step and state.global_step > 0
                ]
                write_atomically(path, "".join(line + "\n" for line in kept))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        control.should_log |= state.global_step >= state.max_steps  # always log the last steps

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        name = METRICS_FILE if "loss" in logs else VALIDATION_FILE
        if not state.is_world_process_zero or not {"loss", "eval_loss"} & set(logs):
            return  # the Trainer's summary at the end of training
        with (self.folder / name).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": state.global_step, **logs}) + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")  # an incomplete line of a killed run
