"""Checkpoints to resume from: whole or not at all, checked before they are trusted, the last few and the best kept."""

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

PARTIAL = "unfinished"  # what is being written is in here, and moves out of it when it is whole


class SealedCheckpointTrainer(Trainer):
    """A Trainer whose checkpoints appear under their name when every rank has written all of its files.

    Ranks on several nodes write to one shared folder.
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
        """Draw the epoch's order first; nothing where every step is done: the Trainer asks after a step alone, and a
        run that was cut off between its last checkpoint and its end would take one too many.
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
                if self.state.best_global_step:  # which the Trainer looks for in the partial folder
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
        """Keep the newest checkpoint, which a stopped run continues from: the Trainer's limit of 1 is for the best."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.args.save_total_limit = limit

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn of no tied weight, such as that of `lm_head`: a checkpoint holds it once, under its other name."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _load_best_model(self) -> None:
        """Load it if it is as it was written: of one that isn't there, the Trainer warns and keeps the last weights."""
        run_folder = Path(super()._get_output_dir(None))  # which may have moved since the checkpoint was written
        best = run_folder / Path(str(self.state.best_model_checkpoint)).name
        found = on_first_process(lambda: find_damage(best) if best.is_dir() else "it isn't there")
        if found is not None:
            raise RunStopped(
                f"train.finish_with is 'best', and the best checkpoint {best} can't be used ({found}): put a good copy "
                "there, or start anew with output.dir=FOLDER"
            )
        self.state.best_model_checkpoint = str(best)
        super()._load_best_model()


@contextmanager
def stopped_if_unwritten(name: str, run_folder: Path) -> Iterator[None]:
    """Raise RunStopped where what is written here can't be, such as on a full disk; no part of it is left."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch says RuntimeError where a write fails
        if is_first_process():
            shutil.rmtree(run_folder / PARTIAL, ignore_errors=True)
        raise RunStopped(f"{name} could not be written ({first_line(error)}): {resume_advice(run_folder)}") from error


def resume_advice(run_folder: Path) -> str:
    """One line on what the user of a run that stopped has, and can do."""
    if is_finished(run_folder):
        return f"{run_folder} holds the trained checkpoint; the same command goes on with what comes after it"
    last = next(_newest_first(run_folder), None)
    if last is None:
        return "no checkpoint had been written; the same command starts the run anew"
    return f"the last good checkpoint is {last}; the same command continues from it"


def last_complete_checkpoint(run_folder: Path, console: Console) -> str | None:
    """The newest checkpoint whose files are all as they were written; None where there is none.

    Each newer one that is damaged is named, with what is wrong with it.
    """
    for checkpoint in _newest_first(run_folder):
        found = find_damage(checkpoint)
        if found is None:
            return str(checkpoint)
        console.print(f"{checkpoint} is damaged ({found}): the one before it is used", style="yellow", markup=False)
    return None


def set_damaged_aside(run_folder: Path, chosen: str | None, console: Console) -> None:
    """Rename the checkpoints after the one that was chosen, which are damaged: while there is a newer one, new
    checkpoints are taken for the oldest and deleted.
    """
    for checkpoint in _newest_first(run_folder):
        if str(checkpoint) == chosen:
            return
        aside = run_folder / f"damaged-{checkpoint.name}"
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
        console.print(f"{checkpoint} is now {aside.name}, for you to remove", style="yellow", markup=False)


def _newest_first(run_folder: Path) -> Iterator[Path]:
    found = {}
    for folder in run_folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if folder.is_dir() and step.isdigit():
            found[int(step)] = folder
    return (found[step] for step in sorted(found, reverse=True))


def _move(source: Path, target: Path) -> None:
    if target.exists():  # damaged, or of a run that went on from an earlier one
        shutil.rmtree(target)
    os.replace(source, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
