"""A run in Weights & Biases: the Trainer's callback logs the metrics of steps, and this module everything else."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rich.console import Console

from eval.results import Report
from eval.score.predictions import read_predictions
from eval.score.scores import NOT_COMPUTABLE
from skipdecode import ConfigError
from skipdecode.errors import first_line
from train.distributed import is_first_process
from train.recipe import Recipe, TrackingSection

Mode: TypeAlias = Literal["online", "offline", "off"]

LOGIN_SECONDS = 9  # timeout of the login; with the start of W&B's process it takes ten seconds
_TIMEOUT = "WANDB_HTTP_TIMEOUT"  # environment variable that `wandb.login` reads
ID_FILE = "wandb_id"  # holds W&B's id of the run, so that a resumed run continues it
SCHEDULES_FILE = "schedules.png"
SAMPLES = 8  # number of prompts whose predictions are logged
_ARTIFACT = (
    *("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.py", "custom_generate/*.py", "README.md"),
    *("recipe.yaml", "eval/report.*", "eval/frontier.png"),
)


class Tracker:
    """Logs a run's pictures, tables and checkpoint; without a W&B run it does nothing."""

    def __init__(self, run: Any | None) -> None:
        self._run = run

    def schedules(self, folder: Path) -> None:
        """Log the picture of the schedules."""
        if self._run is not None:
            import wandb

            self._run.log({"schedules": wandb.Image(str(folder / SCHEDULES_FILE))}, commit=False)

    def evaluation(self, folder: Path, report: Report) -> None:
        """Log the frontier as a table and a picture, and sample predictions at each speed."""
        if self._run is None:
            return
        import wandb

        columns = report.columns()
        values = [[cell(row) for _, cell in columns] for row in report.rows]
        labels = [row.label for row in report.rows]
        files = [read_predictions(folder / "predictions" / f"{label}.jsonl") for label in labels]
        predictions = [list(islice(found.values(), SAMPLES)) for found in files]
        samples = [
            [first.prompt, first.references[0], *(of_speed[n].prediction for of_speed in predictions)]
            for n, first in enumerate(predictions[0])
        ]
        self._run.log(
            {
                "frontier": wandb.Table(columns=[name for name, _ in columns], data=values),
                "frontier_picture": wandb.Image(str(folder / "frontier.png")),
                "samples": wandb.Table(columns=["prompt", "reference", *labels], data=samples),
            }
        )
        for row in report.rows:
            for metric, value in row.scores.items():
                self._run.summary[f"{metric}_{row.label}"] = value
            for metric, reason in report.unavailable.items():
                self._run.summary[f"{metric}_{row.label}"] = f"{NOT_COMPUTABLE}, because {reason}"
            self._run.summary[f"speedup_{row.label}"] = row.wall_clock_speedup

    def checkpoint(self, folder: Path) -> None:
        """Log the finished checkpoint as an artifact, without the files that only training needs."""
        if self._run is None:
            return
        import wandb

        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="model")
        for pattern in _ARTIFACT:
            for file in sorted(folder.glob(pattern)):
                artifact.add_file(str(file), name=file.relative_to(folder).as_posix())
        self._run.log_artifact(artifact)


def choose_mode(section: TrackingSection, console: Console) -> Mode:
    """Choose how a run is tracked; "auto" is online if W&B accepts the API key within LOGIN_SECONDS, else offline.

    Raises ConfigError where the recipe requires online tracking and the login fails.
    """
    if section.wandb in ("off", "offline"):
        return section.wandb
    import wandb

    reason = "no API key is set (`wandb login` sets one)"
    before = os.environ.get(_TIMEOUT)
    os.environ.setdefault(_TIMEOUT, str(LOGIN_SECONDS))
    try:
        if wandb.login(prompt=False, verify=True):
            return "online"
    except wandb.errors.Error as error:
        reason = f"W&B can't be reached, or rejects the API key ({first_line(error)})"
        if section.wandb == "auto":
            console.print(f"{reason}: the run is tracked offline; `wandb sync` uploads it later", soft_wrap=True)
    finally:
        if before is None:
            del os.environ[_TIMEOUT]
    if section.wandb == "online":
        raise ConfigError(f"tracking.wandb is 'online': {reason}; fix this, or set tracking.wandb=offline")
    return "offline"


@contextmanager
def tracked(recipe: Recipe, name: str, folder: Path, mode: Mode, console: Console) -> Iterator[Tracker]:
    """A context with a W&B run in `folder`, in the first process, unless tracking is off.

    The run is marked as failed if the context raises. Raises ConfigError where W&B rejects the run, unless the recipe
    lets it fall back to offline tracking ("auto").
    """
    if mode == "off" or not is_first_process():
        yield Tracker(None)
        return
    import wandb

    try:
        run = _start(recipe, name, folder, mode)
    except wandb.errors.Error as error:
        if recipe.tracking.wandb != "auto":
            raise ConfigError(f"tracking.wandb is {mode!r}, but W&B rejects the run: {first_line(error)}") from error
        console.print(f"W&B rejects the run ({first_line(error)}): it is tracked offline", soft_wrap=True)
        try:
            run = _start(recipe, name, folder, "offline")
        except wandb.errors.Error as offline:
            raise ConfigError(f"tracking.wandb is 'auto', but W&B rejects the run: {first_line(offline)}") from offline
    try:
        yield Tracker(run)
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def _start(recipe: Recipe, name: str, folder: Path, mode: Literal["online", "offline"]) -> Any:
    import wandb

    return wandb.init(
        mode=mode,
        project=recipe.tracking.project,
        name=recipe.tracking.name or name,
        id=_run_id(folder),
        resume="allow" if mode == "online" else None,
        dir=str(folder),
        config=recipe.model_dump(),
        settings=wandb.Settings(silent=mode == "offline"),
    )


def _run_id(folder: Path) -> str:
    file = folder / ID_FILE
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()
