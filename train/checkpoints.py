"""Checkpoints to resume from: written atomically, verified by checksum before use; the newest and the best are kept."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from skipdecode.checkpoint.checksums import find_damage, write_checksums
from skipdecode.errors import first_line
from train.data_order import DataOrder, rows_a_step, rows_hash
from train.distributed import is_first_process, on_first_process
from train.output import is_finished
from train.stops import RunStopped

PARTIAL = "unfinished"  # subfolder in which a checkpoint is written; it is moved out when it is complete


class SealedCheckpointTrainer(Trainer):
    """A Trainer whose checkpoints appear under their names only when every rank has written all of its files.

    Ranks on several nodes must share one output folder.
    """

    _partial_folder: Path | None = None
    _order: DataOrder | None = None

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(train_dataset)
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        self._order = DataOrder(list(dataset["length"]), rows_a_step(self.args), self.args.seed, rows_hash(dataset))
        return self._order

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Set the epoch's data order first, and run nothing if all steps are done.

        The Trainer checks the number of steps only after a step, so a run that was interrupted after its last
        checkpoint would take one step too many.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        if self._order is not None:
            self._order.start(self.state.global_step)
        super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._partial_folder or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        run_folder = Path(super()._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        partial = run_folder / PARTIAL
        if self.args.should_save:
            shutil.rmtree(partial, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._partial_folder = partial
        try:
            with stopped_if_unwritten(name, run_folder):
                super()._save_checkpoint(model, trial)
                if self.state.best_global_step:  # the Trainer wrote a path inside the partial folder
                    self.state.best_model_checkpoint = str(
                        run_folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
                    )
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    self.state.save_to_json(str(partial / name / TRAINER_STATE_NAME))
                    if self._order is not None:
                        self._order.save(partial / name)
                    write_checksums(partial / name, [file for file in (partial / name).rglob("*") if file.is_file()])
                    _move(partial / name, run_folder / name)
                    partial.rmdir()
        finally:
            self._partial_folder = None
        if self.args.should_save:
            rotate_checkpoints(str(run_folder), self.args.save_total_limit, self.state.best_model_checkpoint)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the newest checkpoint, to resume from: with a limit of 1 the Trainer would keep the best one alone."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.args.save_total_limit = limit

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Don't warn of missing tied weights, such as `lm_head`: a checkpoint saves them once, under the other name."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _load_best_model(self) -> None:
        """Stop if the best checkpoint is damaged or missing: the Trainer would warn and keep the last weights."""
        run_folder = Path(super()._get_output_dir(None))  # the folder may have moved since the checkpoint was written
        best = run_folder / Path(str(self.state.best_model_checkpoint)).name
        found = on_first_process(lambda: find_damage(best) if best.is_dir() else "it doesn't exist")
        if found is not None:
            raise RunStopped(
                f"train.finish_with is 'best', but the best checkpoint {best} can't be used ({found}): restore it from "
                "a copy, or start a new run with output.dir=FOLDER"
            )
        self.state.best_model_checkpoint = str(best)
        super()._load_best_model()


@contextmanager
def stopped_if_unwritten(name: str, run_folder: Path) -> Iterator[None]:
    """Turn a failed write in this context, such as on a full disk, into RunStopped, and remove the partial files."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError where a write fails
        if is_first_process():
            shutil.rmtree(run_folder / PARTIAL, ignore_errors=True)
        raise RunStopped(f"{name} could not be written ({first_line(error)}): {resume_advice(run_folder)}") from error


def resume_advice(run_folder: Path) -> str:
    """One line that tells the user of a stopped run what was saved and how to continue."""
    if is_finished(run_folder):
        return f"{run_folder} holds the trained checkpoint; the same command continues with the steps after training"
    last = next(_newest_first(run_folder), None)
    if last is None:
        return "no checkpoint was written yet; the same command restarts the run"
    return f"the last good checkpoint is {last}; the same command continues from it"


def last_complete_checkpoint(run_folder: Path, console: Console) -> str | None:
    """The newest checkpoint with intact files, or None; a warning names each newer damaged one and its damage."""
    for checkpoint in _newest_first(run_folder):
        found = find_damage(checkpoint)
        if found is None:
            return str(checkpoint)
        console.print(f"{checkpoint} is damaged ({found}): using the one before it", style="yellow", markup=False)
    return None


def set_damaged_aside(run_folder: Path, chosen: str | None, console: Console) -> None:
    """Rename the damaged checkpoints, which are newer than the chosen one.

    Left in place, they would make the Trainer's rotation delete new checkpoints as the oldest.
    """
    for checkpoint in _newest_first(run_folder):
        if str(checkpoint) == chosen:
            return
        aside = run_folder / f"damaged-{checkpoint.name}"
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
        console.print(f"{checkpoint} was renamed to {aside.name}; you may delete it", style="yellow", markup=False)


def _newest_first(run_folder: Path) -> Iterator[Path]:
    found = {}
    for folder in run_folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if folder.is_dir() and step.isdigit():
            found[int(step)] = folder
    return (found[step] for step in sorted(found, reverse=True))


def _move(source: Path, target: Path) -> None:
    if target.exists():  # a damaged checkpoint, or one of a run that resumed from an earlier step
        shutil.rmtree(target)
    os.replace(source, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
