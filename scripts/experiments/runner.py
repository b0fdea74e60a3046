"""The runner of all experiments: it trains variants of a recipe, evaluates them and shows them in a table.

Each variant is trained into a folder with its name, next to its log. Then the finished variants are evaluated into
evaluated/, one after the other, because they are timed: don't use the machine for anything else meanwhile. At the end
come a table and a picture. The same command continues after a stop: finished variants are not repeated, and interrupted
ones continue. Trainings are independent: with --jobs 2 and OMP_NUM_THREADS=1 they take half the time on two cores.
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
from scripts.experiments.variants import Variants
from skipdecode.cli.process import ended_by_sigterm
from skipdecode.errors import ConfigError, check_counts, unknown
from skipdecode.files import read_lines, write_atomically
from skipdecode.schedule.schedule import Over

SPEEDS = (1.0, 2.0, 3.0, 4.0)
RUNNING: set[subprocess.Popen[bytes]] = set()


def at_speeds(speeds: Sequence[float] = SPEEDS) -> list[str]:
    """Options of `python -m eval` for these targets."""
    return ["--speedup", *(f"{speed:g}" for speed in speeds)]


@dataclass(frozen=True)
class Experiment:
    """A comparison of variants of a recipe.

    Attributes:
        name: file name of the table and the picture.
        title: title of the picture.
        overrides: makes the overrides of each variant; a variant for which this raises ConfigError is skipped.
        table: makes the Markdown lines from the reports by label.
        frontiers: selects the reports to draw.
        evaluations: options of `python -m eval` by label, for a variant's name and the folder of its run.
        over: the speedup to draw, decode or end-to-end; None: that of the targets.
    """

    name: str
    title: str
    overrides: Mapping[str, Callable[[Variants], Sequence[str]]]
    table: Callable[[Variants, Mapping[str, Report]], Sequence[str]]
    frontiers: Callable[[Mapping[str, Report]], Mapping[str, Report]] = dict
    evaluations: Callable[[str, Path], Mapping[str, Sequence[str]]] = lambda name, run: {name: at_speeds()}
    over: Over | None = None


def make_parser(description: str, recipe: str = "e2e-tiny", epilog: str | None = None) -> argparse.ArgumentParser:
    """The options that every experiment has."""
    parser = argparse.ArgumentParser(
        description=description + (__doc__ or "").partition("\n")[2],
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", default=recipe, metavar="NAME", help=f"a recipe or YAML file (default {recipe})")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="the task's folder; default: the recipe's")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder of the experiment")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="train only these variants")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trainings that run in parallel (default 1)")
    parser.add_argument("--train-only", action="store_true", help="don't evaluate; run again without this to do so")
    parser.add_argument("--limit", type=int, metavar="N", help="evaluate only the first N prompts of the test set")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the recipe in all variants")
    return parser


def run_experiment(options: argparse.Namespace, experiment: Experiment) -> int:
    """Train and evaluate the unfinished variants, and show all. Returns exit status 1 if a command failed, else 0."""
    check_counts(**{"--jobs": options.jobs})
    if options.limit is not None and options.limit < 2:
        raise ConfigError(f"--limit is {options.limit}: it must be at least 2 for confidence intervals")
    if any(word.startswith("data.path=") for word in options.overrides):
        raise ConfigError("data.path as an override applies to training alone: set the folder with --data-dir")
    following = [word for word in options.only if "=" in word and word not in experiment.overrides]
    only = [word for word in options.only if word not in following]
    common = ["tracking.wandb=off", *options.overrides, *following]
    if options.data_dir is not None:
        common.insert(0, f"data.path={options.data_dir.resolve()}")
    variants = Variants(options.recipe, tuple(common))
    overrides = resolve(experiment, variants, only)
    output: Path = options.output.resolve()  # commands run in another working directory
    with only_writer(output, "--output"):
        train = ["train.py", "--recipe", variants.name, *common]
        runs = {name: output / folder_name(name) for name in experiment.overrides}
        commands = {runs[name]: [*train, *each, f"output.dir={runs[name]}"] for name, each in overrides.items()}
        for folder, command in commands.items():
            check_finished(folder, "config.json", command)
        done = run_unfinished(commands, "config.json", options.jobs)
        if not options.train_only:
            finished = {name: run for name, run in runs.items() if (run / "config.json").exists()}
            reports, all_evaluated = evaluate(options, experiment, finished)
            show(experiment, variants, reports, output)
            done = done and all_evaluated
    return int(not done)


def resolve(experiment: Experiment, variants: Variants, only: Sequence[str]) -> dict[str, Sequence[str]]:
    """The overrides of the variants to train. Raises ConfigError for unknown or impossible variants in `only`."""
    found = {}
    for name in only or experiment.overrides:
        if name not in experiment.overrides:
            raise unknown("variant", name, experiment.overrides)
        try:
            overrides = experiment.overrides[name](variants)
            variants.sampler(overrides)  # raises ConfigError for impossible settings before the first run
            found[name] = overrides
        except ConfigError as error:
            if only:
                raise
            print(f"{name} is skipped: {error}", file=sys.stderr)
    return found


def folder_name(label: str) -> str:
    """A folder name for a label, such as `list-half-distilled` for `list, half distilled`."""
    return label.replace(", ", "-").replace(" ", "-").replace("/", "-")


def evaluate(
    options: argparse.Namespace, experiment: Experiment, runs: Mapping[str, Path]
) -> tuple[dict[str, Report], bool]:
    """Evaluate finished runs, one after the other. Returns the reports by label, and whether all succeeded."""
    common = ["--data-dir", str(options.data_dir.resolve())] if options.data_dir is not None else []
    common += ["--limit", str(options.limit)] if options.limit is not None else []
    evaluated: Path = options.output.resolve() / "evaluated"
    folders, commands = {}, {}
    for name, run in runs.items():
        for label, how in experiment.evaluations(name, run).items():
            folders[label] = folder = evaluated / folder_name(label)
            commands[folder] = ["-m", "eval", "--checkpoint", str(run), *how, *common, "--output", str(folder)]
    evaluated.mkdir(exist_ok=True)
    for folder, command in commands.items():
        check_finished(folder, FILE_NAME, command)
    done = run_unfinished(commands, FILE_NAME, 1)
    files = {label: folder / FILE_NAME for label, folder in folders.items()}
    return {label: Report.load(file) for label, file in files.items() if file.exists()}, done


def show(experiment: Experiment, variants: Variants, reports: Mapping[str, Report], output: Path) -> None:
    """Print and save the table, and draw the picture."""
    if not reports:
        return
    lines = experiment.table(variants, reports)
    minutes = [sum(seconds) / 60 for seconds in zip(*spent_in(output).values(), strict=True)]
    if minutes:
        lines = [*lines, "", f"CPU time: {minutes[0]:.1f} minutes; summed wall-clock time: {minutes[1]:.1f} minutes."]
    text = "\n".join(lines)
    write_atomically(output / f"{experiment.name}.md", text + "\n")
    print(text)
    drawn = experiment.frontiers(reports) or reports
    draw_frontier(
        output / f"{experiment.name}.png", drawn, f"{variants.task.name}: {experiment.title}", over=experiment.over
    )


def spent_in(output: Path) -> dict[str, tuple[float, float]]:
    """CPU seconds and wall-clock seconds of the commands of each folder, including interrupted ones."""
    spent: dict[str, tuple[float, float]] = {}
    for file in sorted(output.rglob("*.seconds")):
        entries = [json.loads(line) for line in read_lines(file)]
        spent[str(file)] = (sum(entry["core"] for entry in entries), sum(entry["clock"] for entry in entries))
    return spent


def sibling(folder: Path, kind: str) -> Path:
    """A file next to a folder, such as `NAME.log`."""
    return folder.with_name(f"{folder.name}.{kind}")


def check_finished(folder: Path, mark: str, command: Sequence[str]) -> None:
    """Raise ConfigError where a finished folder, which has the file `mark`, was made by another command than this."""
    file = sibling(folder, "command.json")
    if not (folder / mark).exists() or not file.exists():  # earlier versions wrote none
        return
    changed = difference(*(settings_in(words) for words in (json.loads(file.read_text(encoding="utf-8")), command)))
    if changed:
        raise ConfigError(
            f"{folder} was made with other settings ({changed}): choose another --output, delete the folder to make it "
            f"again, or delete {file.name} to keep it as it is"
        )


def settings_in(command: Sequence[str]) -> dict[str, str]:
    """The words of a command by option or key; of absolute paths, which may have moved, only the name."""
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
    """Run a Python command in the repository, append its CPU and wall-clock time to `seconds`, return its status."""
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
    """Run the Python commands whose folders don't have the file `mark`, each with a log next to its folder.

    A failure is printed at once, and the other commands continue. Returns whether all succeeded.
    """

    def run(folder: Path) -> int:
        write_atomically(sibling(folder, "command.json"), json.dumps(commands[folder]) + "\n")
        return run_python(commands[folder], sibling(folder, "log"), sibling(folder, "seconds"))

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
                    progress.console.print(f"{name} failed with status {status}: see {name}.log")
                progress.advance(bar)
        except BaseException as error:  # such as Ctrl-C; the pool would start the waiting commands
            pool.shutdown(wait=False, cancel_futures=True)
            end_running(started, set(RUNNING) if isinstance(error, KeyboardInterrupt) else set())
            raise
    return not failed


def end_running(started: Iterable[Future[int]], signalled: set[subprocess.Popen[bytes]]) -> None:
    """Stop all running commands with one SIGTERM each, also those that are just starting, and wait for them.

    A training saves a checkpoint on SIGTERM.

    Args:
        started: futures of the commands.
        signalled: processes that are stopping already: Ctrl-C reaches all processes of a terminal.
    """
    while not all(future.done() for future in started):
        for process in set(RUNNING) - signalled:
            process.terminate()
            signalled.add(process)
        time.sleep(0.05)
