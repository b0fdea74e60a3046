"""The runner of every experiment: variants of a recipe that are trained, evaluated and shown side by side.

Each variant goes into a folder of its name, a finished run like any other, with a log beside it. Then all finished
ones are evaluated into evaluated/, one after the other, since they are timed: leave the machine alone. A table and a
picture end it. What is finished is not done again, and what was cut off goes on: start it again after a stop. Runs are
independent: two at a time with OMP_NUM_THREADS=1 take half as long on two cores (--jobs 2).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from configs.files import ROOT
from eval.console import bar_columns, make_console
from eval.difference import difference
from eval.drawing import draw_frontier
from eval.output import only_writer
from eval.results import FILE_NAME, Report
from eval.tables import Table
from scripts.experiments.variants import Variants
from skipdecode.cli.process import ended_by_sigterm
from skipdecode.errors import ConfigError, check_counts, unknown
from skipdecode.files import read_lines, write_atomically
from skipdecode.schedule.schedule import Over

SPEEDS = (1.0, 2.0, 3.0, 4.0)
RUNNING: set[subprocess.Popen[bytes]] = set()


def at_speeds(speeds: Sequence[float] = SPEEDS) -> list[str]:
    """The options of `python -m eval` that decode at these targets."""
    return ["--speedup", *(f"{speed:g}" for speed in speeds)]


@dataclass(frozen=True)
class Experiment:
    """Variants of a recipe that are compared.

    Attributes:
        name: of its table and its picture.
        title: of the picture.
        overrides: of each variant, made when the recipe is known; where that raises ConfigError, it is left out.
        table: lines of Markdown, of the reports by their labels.
        frontiers: those of the reports that are drawn.
        evaluations: of a variant and the folder of its finished run, options of `python -m eval` by label.
        over: the speed that is drawn; None: what all targets are of.
        starts: the variants from whose finished runs the others start: they are trained before them, and always.
        metrics: that the table needs of the task.
    """

    name: str
    title: str
    overrides: Mapping[str, Callable[[Variants], Sequence[str]]]
    table: Callable[[Variants, Mapping[str, Report]], Sequence[str]]
    frontiers: Callable[[Mapping[str, Report]], Mapping[str, Report]] = dict
    evaluations: Callable[[str, Path], Mapping[str, Sequence[str]]] = lambda name, run: {name: at_speeds()}
    over: Over | None = None
    starts: Sequence[str] = ()
    metrics: Sequence[str] = ()


def make_parser(description: str, recipe: str = "e2e-tiny", epilog: str | None = None) -> argparse.ArgumentParser:
    """The options that every experiment has."""
    parser = argparse.ArgumentParser(
        description=description + (__doc__ or "").partition("\n")[2],
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", default=recipe, metavar="NAME", help=f"or a YAML file (default {recipe})")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="the task's folder; default: the recipe's")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="a folder for all of it")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="train these, not all")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trainings at a time (default 1)")
    parser.add_argument("--train-only", action="store_true", help="evaluate later: start it again without this")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N prompts of the test set")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe, for all that is trained")
    return parser


def run_experiment(options: argparse.Namespace, experiment: Experiment) -> int:
    """Train what isn't, evaluate what is, and show it. Returns the exit status: 1 where a process of it failed."""
    check_counts(**{"--jobs": options.jobs})
    if options.limit is not None and options.limit < 2:
        raise ConfigError(f"--limit is {options.limit}: it must be at least 2, or there are no intervals")
    if any(word.startswith("data.path=") for word in options.overrides):
        raise ConfigError("data.path among the overrides is of trainings alone: name the folder with --data-dir")
    following = [word for word in options.only if "=" in word and word not in experiment.overrides]
    only = [word for word in options.only if word not in following]
    common = ["tracking.wandb=off", *options.overrides, *following]
    if options.data_dir is not None:
        common.insert(0, f"data.path={options.data_dir.resolve()}")
    variants = Variants(options.recipe, tuple(common))
    missing = [name for name in experiment.metrics if name not in variants.task.metrics]
    if missing:
        has = ", ".join(variants.task.metrics)
        raise ConfigError(f"data.task is {variants.task.name!r}, which has no {missing[0]}: it has {has}")
    overrides = resolve(experiment, variants, only)
    output: Path = options.output.resolve()  # commands run in the checkout
    with only_writer(output, "--output"):
        print_work(variants, overrides)
        train = ["train.py", "--recipe", variants.name, *common]
        runs = {name: output / folder_name(name) for name in experiment.overrides}
        commands = {runs[name]: [*train, *each, f"output.dir={runs[name]}"] for name, each in overrides.items()}
        first = {runs[name]: commands.pop(runs[name]) for name in overrides if name in experiment.starts}
        for folder, command in {**first, **commands}.items():
            check_finished(folder, "config.json", command)
        started = run_unfinished(first, "config.json", options.jobs)
        done = run_unfinished(commands, "config.json", options.jobs) and started
        if not options.train_only:
            finished = {name: run for name, run in runs.items() if (run / "config.json").exists()}
            reports, all_evaluated = evaluate(options, experiment, finished)
            show(experiment, variants, reports, output)
            done = done and all_evaluated
    return int(not done)


def resolve(experiment: Experiment, variants: Variants, only: Sequence[str]) -> dict[str, Sequence[str]]:
    """The overrides of what is to be trained. Raises ConfigError for names in `only` that aren't there or can't be."""
    found = {}
    if only:
        only = [*experiment.starts, *only]
    for name in only or experiment.overrides:
        if name not in experiment.overrides:
            raise unknown("variant", name, experiment.overrides)
        try:
            overrides = experiment.overrides[name](variants)
            variants.sampler(overrides)  # refused before the first run
            found[name] = overrides
        except ConfigError as error:
            if only:
                raise
            print(f"{name} is left out: {error}", file=sys.stderr)
    return found


def print_work(variants: Variants, overrides: Mapping[str, Sequence[str]]) -> None:
    """Say what a step of each computes: all train on the same rows, but not with as much work."""
    whole = variants.work()
    rows = [
        [name, f"{variants.layers(each)}", f"{variants.work(each) / whole:.2f}"] for name, each in overrides.items()
    ]
    print(Table(["variant", "layers", "work a step"], rows).to_markdown())
    print("\nWork: passes of a column through a layer, over the recipe's own; the LM head isn't counted.\n", flush=True)


def folder_name(label: str) -> str:
    """Such as `list-half-distilled` for `list, half distilled`."""
    return label.replace(", ", "-").replace(" ", "-").replace("/", "-")


def evaluated_in(output: Path, label: str) -> Path:
    """The folder of an evaluation."""
    return output.resolve() / "evaluated" / folder_name(label)


def evaluate(
    options: argparse.Namespace, experiment: Experiment, runs: Mapping[str, Path]
) -> tuple[dict[str, Report], bool]:
    """Evaluate finished runs, one after the other; returns the reports by label, and whether all are there."""
    common = ["--data-dir", str(options.data_dir.resolve())] if options.data_dir is not None else []
    common += ["--limit", str(options.limit)] if options.limit is not None else []
    folders, commands = {}, {}
    for name, run in runs.items():
        for label, how in experiment.evaluations(name, run).items():
            folders[label] = folder = evaluated_in(options.output, label)
            commands[folder] = ["-m", "eval", "--checkpoint", str(run), *how, *common, "--output", str(folder)]
    (options.output / "evaluated").mkdir(exist_ok=True)
    for folder, command in commands.items():
        check_finished(folder, FILE_NAME, command)
    done = run_unfinished(commands, FILE_NAME, 1)
    files = {label: folder / FILE_NAME for label, folder in folders.items()}
    return {label: Report.load(file) for label, file in files.items() if file.exists()}, done


def show(experiment: Experiment, variants: Variants, reports: Mapping[str, Report], output: Path) -> None:
    """Print the table, and write it and the picture."""
    if not reports:
        return
    lines = experiment.table(variants, reports)
    minutes = [sum(seconds) / 60 for seconds in zip(*spent_in(output).values(), strict=True)]
    if minutes:
        lines = [*lines, "", f"Machine time: {minutes[0]:.1f} minutes of one core, over {minutes[1]:.1f} minutes."]
    text = "\n".join(lines)
    write_atomically(output / f"{experiment.name}.md", text + "\n")
    print(text)
    drawn = experiment.frontiers(reports) or reports
    draw_frontier(
        output / f"{experiment.name}.png", drawn, f"{variants.task.name}: {experiment.title}", over=experiment.over
    )


def spent_in(output: Path) -> dict[str, tuple[float, float]]:
    """By folder, the seconds of a core and those of a clock that its commands took, also those that were cut off."""
    spent: dict[str, tuple[float, float]] = {}
    for file in sorted(output.rglob("*.seconds")):
        entries = [json.loads(line) for line in read_lines(file)]
        spent[str(file)] = (sum(entry["core"] for entry in entries), sum(entry["clock"] for entry in entries))
    return spent


def beside(folder: Path, kind: str) -> Path:
    """A file of what made a folder, such as its `NAME.log`."""
    return folder.with_name(f"{folder.name}.{kind}")


def check_finished(folder: Path, mark: str, command: Sequence[str]) -> None:
    """Raise ConfigError where a folder with the file `mark` was made by another command than would make it now."""
    file = beside(folder, "command.json")
    if not (folder / mark).exists() or not file.exists():  # earlier versions wrote none
        return
    changed = difference(*(said_in(words) for words in (json.loads(file.read_text(encoding="utf-8")), command)))
    if changed:
        raise ConfigError(
            f"{folder} was made with other settings ({changed}): choose another --output, remove the folder to make it "
            f"anew, or {file.name} to take it as it is"
        )


def said_in(command: Sequence[str]) -> dict[str, str]:
    """The words of a command by their option or key; paths, which may have moved, by their last name."""
    found: dict[str, str] = {}
    option = ""
    for word in command:
        key, equals, value = ("", "", "") if word.startswith("/") else word.partition("=")
        if word.startswith("--"):
            option = word
        where, what = (key, value) if equals else (option, "" if word == option else word)
        what = Path(what).name if what.startswith("/") else what
        found[where] = what if equals else f"{found.get(where, '')} {what}".strip()
    return found


def run_python(command: Sequence[str], log: Path, seconds: Path) -> int:
    """Run a command of Python in the checkout; what it took goes below `seconds`. Returns its status."""
    started = time.monotonic()
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=file, stderr=file)
        RUNNING.add(process)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        RUNNING.remove(process)
    entry = {"core": usage.ru_utime + usage.ru_stime, "clock": time.monotonic() - started}
    with seconds.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
    return process.returncode


def run_unfinished(commands: Mapping[Path, Sequence[str]], mark: str, at_a_time: int) -> bool:
    """Run the commands of Python whose folders don't hold the file `mark`, in the checkout, each with a log beside it.

    Under a progress bar; where one fails, that is said at once, and the others go on. Returns whether none did.
    """

    def run(folder: Path) -> int:
        write_atomically(beside(folder, "command.json"), json.dumps(commands[folder]) + "\n")
        return run_python(commands[folder], beside(folder, "log"), beside(folder, "seconds"))

    failed = False
    columns = (*bar_columns(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn())
    console = make_console(stderr=True)
    started: dict[Future[int], Path] = {}
    with ended_by_sigterm(), Progress(*columns, console=console) as progress, ThreadPoolExecutor(at_a_time) as pool:
        try:
            for folder in commands:
                if not (folder / mark).exists():
                    started[pool.submit(run, folder)] = folder
            bar = progress.add_task("variants", total=len(started))
            for future in as_completed(started):
                if status := future.result():
                    failed = True
                    name = started[future].name
                    progress.console.print(f"{name} failed with status {status}: {name}.log says why")
                progress.advance(bar)
        except BaseException as error:  # such as Ctrl-C: the pool would go on with all that waits
            pool.shutdown(wait=False, cancel_futures=True)
            end_running(started, set(RUNNING) if isinstance(error, KeyboardInterrupt) else set())
            raise
    return not failed


def end_running(started: Iterable[Future[int]], told: set[subprocess.Popen[bytes]]) -> None:
    """End what runs, each process by one SIGTERM, after which a training leaves a checkpoint, and wait for it.

    Also what is only just being started.

    Args:
        started: what runs the processes.
        told: those that end already: Ctrl-C reaches all that a terminal runs.
    """
    while not all(future.done() for future in started):
        for process in set(RUNNING) - told:
            process.terminate()
            told.add(process)
        time.sleep(0.05)
