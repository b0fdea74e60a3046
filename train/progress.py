"""The terminal output of a training run: a progress bar and rows of metrics."""

import datetime
import logging
import math
from typing import Any

from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from transformers import TrainerCallback, TrainerState
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from train.distributed import is_first_process

MAX_ROWS = 40  # of metrics, and of validations, printed in a run
WIDTHS = {"step": 15, "loss": 10, "grad norm": 12, "layers/token": 15, "tokens/s": 12, "time left": 15}  # 79 in all


class TrainingProgress(TrainerCallback):
    """Prints rows with loss, speed and the time left, and on a terminal shows them in a bar too.

    It is a context manager that closes the bar however the run ends. All metrics are in `metrics.jsonl`.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=console,
            expand=True,
            refresh_per_second=2,
            speed_estimate_period=math.inf,  # of the last thousand steps: schedules differ, so a few steps say little
            disable=console.quiet or not console.is_interactive,
        )
        self._task = self._bar.add_task("")
        self._metrics = ""  # of the last log, for the bar
        self._last_row: dict[str, int] = {}  # kind of row -> step at which it was last printed

    def __enter__(self) -> "TrainingProgress":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._bar.reset(self._task, total=state.max_steps, completed=state.global_step)
        self._bar.start()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._bar.update(self._task, completed=state.global_step)
        self._describe()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self._metrics = f"loss {logs['loss']:.3f}, {logs['tokens_per_second']:,.0f} tokens/s, "
            self._describe()
            if "metrics" not in self._last_row:
                self._print_row({name: name for name in WIDTHS})
            if self._is_due("metrics", state):
                self._print_row(
                    {
                        "step": f"{state.global_step}/{state.max_steps}",
                        "loss": f"{logs['loss']:.3f}",
                        "grad norm": f"{logs.get('grad_norm', math.nan):.3g}",
                        "layers/token": f"{logs['layers_per_token']:.2f}",
                        "tokens/s": f"{logs['tokens_per_second']:,.0f}",
                        "time left": self._time_left(),
                    }
                )
        elif "eval_loss" in logs and self._is_due("validation", state):
            targets = [name for name in logs if name.startswith("eval_loss_")]  # from the slowest to the fastest
            losses = [f"{logs[name]:.3f} at {name.removeprefix('eval_loss_')}" for name in targets]
            shown = f"{losses[0]} to {losses[-1]}" if len(losses) > 1 else losses[0]
            self._console.print(f"validation after step {state.global_step}: loss {shown}")

    def _describe(self) -> None:
        self._bar.update(self._task, description=f"{self._metrics}{self._time_left()} left")

    def _is_due(self, kind: str, state: TrainerState) -> bool:
        """Whether to print a row of this kind after this step; the last step always prints one."""
        passed = state.global_step - self._last_row.get(kind, -state.max_steps)
        if passed < state.max_steps / MAX_ROWS and state.global_step < state.max_steps:
            return False
        self._last_row[kind] = state.global_step
        return True

    def _print_row(self, cells: dict[str, str]) -> None:
        self._console.print("".join(f"{cells[name]:>{width}}" for name, width in WIDTHS.items()), soft_wrap=True)

    def _time_left(self) -> str:
        """The estimated time left, such as 0:04:12; before the second step a question mark."""
        seconds = self._bar.tasks[0].time_remaining
        return "?" if seconds is None else str(datetime.timedelta(seconds=seconds))


def quiet_libraries(*, with_deepspeed: bool) -> None:
    """Silence other libraries' progress bars, and warnings that don't concern this run.

    Args:
        with_deepspeed: let DeepSpeed's warnings through; accelerate imports it wherever it is installed.
    """
    show_downloads = not are_progress_bars_disabled()
    disable_progress_bar()  # of loading and saving weights; it turns off the download bars too
    if show_downloads:
        enable_progress_bars()
    if not is_first_process():
        set_verbosity_error()  # the first process prints the warnings
    if not with_deepspeed:
        logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno > logging.WARNING)
