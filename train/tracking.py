"""Where a run's figures go: metrics.jsonl always, Weights & Biases where it is wanted."""

import json
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from train.recipe import Recipe

METRICS_FILE = "metrics.jsonl"


class MetricsFile(TrainerCallback):
    """Appends each logged step to `metrics.jsonl`, flushed, so that a kill loses nothing that was logged."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS_FILE

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and self.path.exists():
            # A resumed run logs the steps after its checkpoint again.
            lines = self.path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) <= state.global_step and state.global_step > 0]
            self.path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or "loss" not in (logs or {}):
            return  # the Trainer's closing summary is no step
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")  # the half line of a killed run


def start_wandb(recipe: Recipe, name: str, folder: Path) -> bool:
    """Start a W&B run unless it is off; the Trainer's own callback logs into it. Returns whether there is one."""
    mode = recipe.tracking.wandb
    if mode == "off" or int(os.environ.get("RANK", "0")) != 0:
        return False
    import wandb

    if mode == "auto":
        mode = "online" if wandb.api.api_key else "offline"
    wandb.init(
        mode=mode,
        project=recipe.tracking.project,
        name=recipe.tracking.name or name,
        dir=str(folder),
        config=recipe.model_dump(),
        settings=wandb.Settings(silent=mode == "offline"),
    )
    return True
