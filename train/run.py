"""A training run, from a resolved recipe to a finished checkpoint."""

import shlex
import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from eval.card import EVALUATION, write_card
from eval.console import make_console
from eval.drawing import draw_schedules
from eval.output import only_writer
from skipdecode import ConfigError
from skipdecode.files import write_whole
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
from train.output import RECIPE_FILE, check_folder, check_schedules, is_finished
from train.prepare import Prepared, introduce, make_arguments, make_trainer, prepare
from train.progress import TrainingProgress
from train.publish.parcel import check_publish, describe, pack
from train.publish.send import send
from train.recipe import PublishSection, Recipe
from train.stops import RunStopped, StopOnSignal
from train.tracking import MetricsFile
from train.weights_and_biases import SCHEDULES_FILE, Mode, choose_mode, tracked


def run(recipe: Recipe, name: str) -> Path:
    """Train what `recipe` says, evaluate it, and return the finished run's folder, which is itself a checkpoint.

    A run that was cut off continues from its last complete checkpoint when it is started again with the same recipe.

    Raises:
        ConfigError: before anything is written, for settings and data that can't be used.
        RunStopped: where the run can't go on, after what can be saved is.
    """
    console = make_console(stderr=True, quiet=not is_first_process())
    check_publish(recipe)
    folder = Path(str(recipe.output.dir))
    finished = is_finished(folder)
    if finished and not is_first_process():
        return folder  # what is left to do, the first process does alone
    task = build_task(recipe)
    arguments = None if finished else make_arguments(recipe, folder)  # which brings the processes together
    with ExitStack() as held:
        mode = on_first_process(lambda: _enter(recipe, folder, held, console))
        prepared = None if arguments is None else prepare(recipe, task, arguments)
        checkpoint = None if prepared is None else _last_checkpoint(prepared, folder, console)
        if prepared is not None:
            on_first_process(partial(check_evaluation, recipe, task, prepared))
        if is_first_process():
            write_whole(folder / RECIPE_FILE, recipe.to_yaml())
            if prepared is not None:
                set_damaged_aside(folder, checkpoint, console)
        tracker = held.enter_context(tracked(recipe, name, folder, mode, console))
        if prepared is not None:
            introduce(console, name, prepared)
            if is_first_process():
                draw_schedules(folder / SCHEDULES_FILE, dict(prepared.skip_config.schedules))
                tracker.schedules(folder)
            stopped = _train(recipe, prepared, checkpoint, folder, console)
            tokenizer, rows = prepared.tokenizer, prepared.encoded.rows
            prepared = None  # decoding needs the memory
            if is_first_process():
                finish(recipe, task, tokenizer, rows, folder, console)
                if stopped:
                    raise RunStopped(f"SIGTERM in the last step: {resume_advice(folder)}", status=143)
        if recipe.evaluation.speedups is not None and is_first_process():
            tracker.evaluation(folder / EVALUATION, evaluate_run(recipe, task, folder))
        if is_first_process() and (folder / "config.json").exists():
            write_card(folder, trust_remote_code=recipe.model.trust_remote_code)
            _publish(recipe.publish, folder, console)
        tracker.checkpoint(folder)
    console.print(
        f"finished: {folder} is a checkpoint; python -m eval --checkpoint {shlex.quote(str(folder))} shows its speeds",
        soft_wrap=True,
    )
    return folder


def _enter(recipe: Recipe, folder: Path, held: ExitStack, console: Console) -> Mode:
    """Take the folder for as long as `held` lasts, and say how the run will be tracked."""
    held.enter_context(only_writer(folder, "output.dir"))
    check_folder(folder, recipe, console)
    return choose_mode(recipe.tracking, console)


def _last_checkpoint(prepared: Prepared, folder: Path, console: Console) -> str | None:
    """The checkpoint to continue from. Raises ConfigError where this run isn't one that can."""
    # One rank looks, and all continue from the same.
    chosen = on_first_process(lambda: last_complete_checkpoint(folder, console))
    if chosen is not None:
        check_world_size(chosen, prepared.arguments.world_size)
        check_rows_a_step(chosen, prepared.arguments)
        check_rows(chosen, prepared.encoded.rows)
        check_schedules(chosen, prepared.skip_config)
    return chosen


def _train(recipe: Recipe, prepared: Prepared, checkpoint: str | None, folder: Path, console: Console) -> bool:
    """Train to the end; returns whether SIGTERM came in the last step, whose end it has waited for."""
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
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)  # of a run that was killed when it had saved
        trainer.accelerator.wait_for_everyone()
        trainer.save_model(str(folder / PARTIAL))
    unset_hf_deepspeed_config()  # from here on the first process is alone: a model that it makes has to be whole
    return stop.stopped


def _publish(section: PublishSection, folder: Path, console: Console) -> None:
    if section.repository is None:
        return
    try:
        parcel = pack(folder, section.repository)
        for line in describe(parcel):
            console.print(line)
        console.print(f"published: {send(parcel, public=section.public, tag=section.tag)}")
    except ConfigError as error:
        words = ["python", "scripts/publish.py", str(folder), section.repository, *["--public"] * section.public]
        words += ["--tag", section.tag] if section.tag is not None else []
        raise ConfigError(f"{error}; the run in {folder} is finished: {shlex.join(words)} publishes it") from error
