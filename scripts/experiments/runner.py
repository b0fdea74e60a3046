"""The runner of every experiment: variants of a recipe that are trained, evaluated and shown side by side.

Each variant goes into a folder of its name, a finished run like any other, with a log beside it. Then all finished
ones are evaluated into evaluated/, one after the other, since they are timed: leave the machine alone. A table and a
picture end it. What is finished is not done again, and what was cut off goes on: start it again after a stop. Runs are
independent: two at a time with OMP_NUM_THREADS=1 take half as long on two cores (--jobs 2).
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from configs.files import ROOT
from eval.console import bar_columns, make_console
from eval.drawing import draw_frontier
from eval.output import only_writer
from eval.results import FILE_NAME, Report
from eval.tables import Table
from scripts.experiments.variants import Variants
from skipdecode.errors import ConfigError, check_counts, unknown
from skipdecode.files import write_whole
from skipdecode.schedule import Over

SPEEDS = (1.0, 2.0, 3.0, 4.0)


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
    parser.add_argument("--recipe", default=recipe, metavar="NAME", help=f"or a YAML file (default {recipe})")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="the task's folder; default: the recipe's")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="a folder for all of it")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="train these, not all")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trainings at a time (default 1)")
    parser.add_argument("--train-only", action="store_true", help="evaluate later: start it again without this")
    parser.add_argument("--limit", metavar="N", help="only the first N prompts of the test set")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe, for all that is trained")
    return parser


def run_experiment(options: argparse.Namespace, experiment: Experiment) -> int:
    """Train what isn't, evaluate what is, and show it. Returns the exit status: 1 where a process of it failed."""
    check_counts(**{"--jobs": options.jobs})
    only = [word for word in options.only if "=" not in word]  # overrides may follow the names
    common = ["tracking.wandb=off", *options.overrides, *(word for word in options.only if "=" in word)]
    if options.data_dir is not None:
        common.insert(0, f"data.path={options.data_dir.resolve()}")
    variants = Variants(options.recipe, tuple(common))
    overrides = resolve(experiment, variants, only)
    output: Path = options.output.resolve()  # commands run in the checkout
    with only_writer(output, "--output"):
        print_work(variants, overrides)
        train = ["train.py", "--recipe", variants.name, *common]
        runs = {name: output / folder_name(name) for name in experiment.overrides}
        commands = {runs[name]: [*train, *each, f"output.dir={runs[name]}"] for name, each in overrides.items()}
        done = run_unfinished(commands, "config.json", options.jobs)
        if not options.train_only:
            finished = {name: run for name, run in runs.items() if (run / "config.json").exists()}
            reports, all_evaluated = evaluate(options, experiment, finished, output / "evaluated")
            show(experiment, variants, reports, output)
            done = done and all_evaluated
    return int(not done)


def resolve(experiment: Experiment, variants: Variants, only: Sequence[str]) -> dict[str, Sequence[str]]:
    """The overrides of what is to be trained. Raises ConfigError for names in `only` that aren't there or can't be."""
    found = {}
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
    return label.replace(", ", "-").replace(" ", "-")


def evaluate(
    options: argparse.Namespace, experiment: Experiment, runs: Mapping[str, Path], into: Path
) -> tuple[dict[str, Report], bool]:
    """Evaluate finished runs, one after the other; returns the reports by label, and whether all are there."""
    common = ["--data-dir", str(options.data_dir.resolve())] if options.data_dir is not None else []
    common += ["--limit", options.limit] if options.limit is not None else []
    folders, commands = {}, {}
    for name, run in runs.items():
        for label, how in experiment.evaluations(name, run).items():
            folders[label] = folder = into / folder_name(label)
            commands[folder] = ["-m", "eval", "--checkpoint", str(run), *how, *common, "--output", str(folder)]
    into.mkdir(exist_ok=True)
    done = run_unfinished(commands, FILE_NAME, 1)
    files = {label: folder / FILE_NAME for label, folder in folders.items()}
    return {label: Report.load(file) for label, file in files.items() if file.exists()}, done


def show(experiment: Experiment, variants: Variants, reports: Mapping[str, Report], output: Path) -> None:
    """Print the table, and write it and the picture."""
    if not reports:
        return
    text = "\n".join(experiment.table(variants, reports))
    write_whole(output / f"{experiment.name}.md", text + "\n")
    print(text)
    drawn = experiment.frontiers(reports) or reports
    draw_frontier(
        output / f"{experiment.name}.png", drawn, f"{variants.task.name}: {experiment.title}", over=experiment.over
    )


def run_unfinished(commands: Mapping[Path, Sequence[str]], mark: str, at_a_time: int) -> bool:
    """Run the commands of Python whose folders don't hold the file `mark`, in the checkout, each with a log beside it.

    Under a progress bar; where one fails, that is said at once, and the others go on. Returns whether none did.
    """

    def run(folder: Path) -> int:
        with folder.with_name(f"{folder.name}.log").open("a", encoding="utf-8") as log:
            return subprocess.run([sys.executable, *commands[folder]], cwd=ROOT, stdout=log, stderr=log).returncode

    failed = False
    columns = (*bar_columns(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn())
    with Progress(*columns, console=make_console(stderr=True)) as progress, ThreadPoolExecutor(at_a_time) as pool:
        started = {pool.submit(run, folder): folder for folder in commands if not (folder / mark).exists()}
        bar = progress.add_task("variants", total=len(started))
        for future in as_completed(started):
            if status := future.result():
                failed = True
                name = started[future].name
                progress.console.print(f"{name} failed with status {status}: {name}.log says why")
            progress.advance(bar)
    return not failed
