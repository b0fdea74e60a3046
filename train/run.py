"""A training run, from a resolved recipe to an evaluated and published checkpoint."""

import shlex
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from data import Task
from eval.card import EVALUATION, write_card
from eval.console import make_console
from eval.drawing import draw_schedules
from eval.output import only_writer
from eval.results import FILE_NAME, Report
from skipdecode import ConfigError
from skipdecode.files import write_atomically
from train.build import build_task
from train.checkpoints import (
    PARTIAL,
    last_complete_checkpoint,
    resume_advice,
    set_damaged_aside,
    stopped_if_unwritten,
)
from train.data_order import check_rows, check_rows_a_step
from train.distributed import check_world_size, is_first_process, on_first_process
from train.evaluation import check_evaluation, evaluate_run
from train.finish import finish
from train.layer_order import ORDER_FILE
from train.machine_profile import PROFILE_FILE
from train.output import RECIPE_FILE, check_folder, check_schedules, is_finished
from train.prepare import Prepared, introduce, make_arguments, make_trainer, prepare
from train.progress import TrainingProgress
from train.publish.parcel import check_publish, describe, pack
from train.publish.send import send
from train.recipe import PublishSection, Recipe
from train.stages import Stage, requested_stages, set_next_stage, stages_left
from train.stops import RunStopped, StopOnSignal
from train.tracking import MetricsFile
from train.weights_and_biases import SCHEDULES_FILE, Mode, Tracker, choose_mode, tracked


def run(recipe: Recipe, name: str) -> Path:
    """Train and evaluate as a recipe says.

    An interrupted run continues from its last complete checkpoint when it is started again with the same recipe; one
    that finished training continues with the stage that was interrupted.

    Args:
        recipe: the resolved recipe.
        name: the recipe's name, for messages and Weights & Biases.

    Returns:
        The folder of the finished run, which is a checkpoint.

    Raises:
        ConfigError: before anything is written, for settings and data that can't be used.
        RunStopped: where the run can't continue; whatever can be saved is saved first.
    """
    console = make_console(stderr=True, quiet=not is_first_process())
    check_publish(recipe)
    folder = Path(str(recipe.output.dir))
    finished = is_finished(folder)
    if finished and not is_first_process():
        return folder  # the first process alone does the stages after training
    task = build_task(recipe)
    arguments = None if finished else make_arguments(recipe, folder)
    with ExitStack() as held:
        mode = on_first_process(lambda: _enter(recipe, folder, held, console))
        prepared = None if arguments is None else prepare(recipe, task, arguments)
        checkpoint = None if prepared is None else _last_checkpoint(prepared, folder, console)
        if prepared is not None:
            on_first_process(partial(check_evaluation, recipe, task, prepared))
        on_first_process(lambda: write_atomically(folder / RECIPE_FILE, recipe.to_yaml()))
        if prepared is not None and prepared.layer_order is not None:
            on_first_process(partial(prepared.layer_order.save, folder / ORDER_FILE))
        if prepared is not None and prepared.profile is not None:
            on_first_process(partial(prepared.profile.save, folder / PROFILE_FILE))
        if prepared is not None:
            on_first_process(lambda: set_damaged_aside(folder, checkpoint, console))
        with tracked(recipe, name, folder, mode, console) as tracker:
            if prepared is not None:
                introduce(console, name, prepared)
                if is_first_process():
                    draw_schedules(folder / SCHEDULES_FILE, dict(prepared.skip_config.schedules))
                    tracker.schedules(folder)
                stopped = _train(recipe, prepared, checkpoint, folder, console)
                tokenizer, rows = prepared.tokenizer, prepared.encoded.rows
                prepared = None  # free its memory for decoding
                if is_first_process():
                    set_next_stage(folder, next(iter(requested_stages(recipe)), None))
                    finish(recipe, task, tokenizer, rows, folder, console)
                    if stopped:
                        raise RunStopped(f"SIGTERM during the last step: {resume_advice(folder)}", status=143)
            if is_first_process():
                _do_stages(recipe, task, folder, tracker, console)
        if is_first_process():
            set_next_stage(folder, None)  # only now has W&B received everything
    console.print(
        f"finished: the checkpoint is {folder}; to measure its speedups: "
        f"python -m eval --checkpoint {shlex.quote(str(folder))}",
        soft_wrap=True,
    )
    return folder


def _enter(recipe: Recipe, folder: Path, held: ExitStack, console: Console) -> Mode:
    """Lock and check the folder, until `held` is closed, and choose how the run is tracked."""
    held.enter_context(only_writer(folder, "output.dir"))
    check_folder(folder, recipe, console)
    if is_finished(folder):
        left = ", ".join(stages_left(folder, recipe))
        console.print(f"{folder} is trained; these stages remain to be done: {left}", soft_wrap=True)
    return choose_mode(recipe.tracking, console)


def _last_checkpoint(prepared: Prepared, folder: Path, console: Console) -> str | None:
    """The checkpoint to continue from, or None. Raises ConfigError where this run can't continue from it."""
    # The first process chooses, so that all of them continue from the same checkpoint.
    chosen = on_first_process(lambda: last_complete_checkpoint(folder, console))
    if chosen is not None:
        check_world_size(chosen, prepared.arguments.world_size)
        check_rows_a_step(chosen, prepared.arguments)
        check_rows(chosen, prepared.encoded.rows)
        check_schedules(chosen, prepared.skip_config)
    return chosen


def _train(recipe: Recipe, prepared: Prepared, checkpoint: str | None, folder: Path, console: Console) -> bool:
    """Train to the end. Returns whether SIGTERM came during the last step."""
    stop = StopOnSignal()
    with TrainingProgress(console) as progress:
        trainer = make_trainer(recipe, prepared, [MetricsFile(folder), progress, stop])
        if checkpoint is not None:
            console.print(f"continuing from {checkpoint}", soft_wrap=True)
        trainer.train(resume_from_checkpoint=checkpoint)
    if stop.stopped and trainer.state.global_step < trainer.state.max_steps:
        raise RunStopped(f"SIGTERM after step {trainer.state.global_step}: {resume_advice(folder)}", status=143)
    with stopped_if_unwritten("the finished checkpoint", folder):
        if is_first_process():
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)  # left by a run that was killed after it saved
        trainer.accelerator.wait_for_everyone()
        trainer.save_model(str(folder / PARTIAL))
    unset_hf_deepspeed_config()  # from here on the first process works alone, so its models must not be sharded
    return stop.stopped


def _do_stages(recipe: Recipe, task: Task, folder: Path, tracker: Tracker, console: Console) -> None:
    """Do the remaining stages of a trained run. Raises ConfigError and other errors of a stage that fails."""
    report = folder / EVALUATION / FILE_NAME
    work: dict[Stage, Callable[[], Any]] = {
        "the evaluation": lambda: report.exists() or evaluate_run(recipe, task, folder),
        "the results in W&B": lambda: tracker.evaluation(report.parent, Report.load(report)),
        "the model card": lambda: write_card(folder, trust_remote_code=recipe.model.trust_remote_code),
        "publishing": lambda: _publish(recipe.publish, folder, console),
        "the checkpoint in W&B": lambda: tracker.checkpoint(folder),
    }
    for stage in stages_left(folder, recipe):
        set_next_stage(folder, stage)
        try:
            work[stage]()
        except ConfigError as error:
            raise ConfigError(f"{error}; {folder} is trained, and the same command continues with {stage}") from error


def _publish(section: PublishSection, folder: Path, console: Console) -> None:
    parcel = pack(folder, str(section.repository))
    for line in describe(parcel):
        console.print(line)
    console.print(f"published: {send(parcel, public=section.public, tag=section.tag)}")
