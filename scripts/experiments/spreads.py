"""Spreads of the budgets, (max - min) / (max + min), compared by the frontiers of what is trained under them.

    python scripts/experiments/spreads.py --output outputs/spreads

Trains the quickstart recipe under each spread with each seed, all for as many steps as the recipe says, evaluates each
at 1x to 4x, prints a table, and draws the frontiers, means over seeds, into spreads.png. What is finished is not run
again: start it again to go on after a stop. Runs are independent: two at a time with OMP_NUM_THREADS=1 take half as
long on two cores (--jobs 2).
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.frontier import draw_frontier
from eval.results import Report
from scripts.experiments.variants import run_jobs, run_logged
from skipdecode.command import run_command

SPEEDS = ["1", "2", "3", "4"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--spreads", nargs="+", type=float, default=[0.5, 0, 0.25, 0.75], metavar="S")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], metavar="N", help="of the training")
    parser.add_argument("--recipe", default="quickstart", metavar="NAME", help="default: quickstart")
    parser.add_argument("--data-dir", metavar="DIR", help="the task's local folder, where it needs one")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for all of them")
    options = parser.parse_intermixed_args()
    options.output.mkdir(parents=True, exist_ok=True)
    runs = [(spread, seed) for seed in options.seeds for spread in options.spreads]
    jobs = {folder_of(options, *of).name: partial(run, options, *of) for of in runs}
    if run_jobs(jobs, options.jobs):
        return 1
    found = {spread: [load(options, spread, seed) for seed in options.seeds] for spread in options.spreads}
    means = {f"spread {spread:g}": mean(reports) for spread, reports in found.items()}
    seeds = "one seed" if len(options.seeds) == 1 else f"means of {len(options.seeds)} seeds"
    title = f"{options.recipe}: budgets of different spread, {seeds}"
    draw_frontier(options.output / "spreads.png", means, title)
    print("| spread | " + " | ".join(f"{speed}x: max to min, measured, BLEU [seeds]" for speed in SPEEDS) + " |")
    print("| ---: |" + " --- |" * len(SPEEDS))
    for spread, reports in found.items():
        print(f"| {spread:g} | " + " | ".join(cell(reports, n) for n in range(len(SPEEDS))) + " |")
    return 0


def cell(reports: Sequence[Report], number: int) -> str:
    """One speed of one spread over its seeds."""
    rows = [report.rows[number] for report in reports]
    bleu = [row.scores["bleu"] for row in rows]
    speed = statistics.fmean(row.wall_clock_speedup for row in rows)
    budgets = f"{rows[0].schedule['max_layers']} to {rows[0].schedule['min_layers']}"
    each = ", ".join(f"{value:.2f}" for value in bleu)
    return f"{budgets}, {speed:.2f}x, {statistics.fmean(bleu):.2f} [{each}]"


def mean(reports: Sequence[Report]) -> Report:
    """A report whose speeds and BLEU are the means of several; everything else is the first one's."""
    rows = []
    for several in zip(*(report.rows for report in reports), strict=True):
        lower, upper = (statistics.fmean(row.wall_clock_quartiles[n] for row in several) for n in (0, 1))
        rows.append(
            replace(
                several[0],
                mean_layers=statistics.fmean(row.mean_layers for row in several),
                scores={"bleu": statistics.fmean(row.scores["bleu"] for row in several)},
                wall_clock_speedup=statistics.fmean(row.wall_clock_speedup for row in several),
                wall_clock_quartiles=(lower, upper),
            )
        )
    return replace(reports[0], rows=rows)


def folder_of(options: argparse.Namespace, spread: float, seed: int) -> Path:
    return Path(options.output) / f"spread-{spread:g}-seed-{seed}"


def load(options: argparse.Namespace, spread: float, seed: int) -> Report:
    return Report.load(folder_of(options, spread, seed) / "eval" / "report.json")


def run(options: argparse.Namespace, spread: float, seed: int) -> None:
    folder = folder_of(options, spread, seed)
    data = ["--data-dir", options.data_dir] if options.data_dir else []
    settings = [f"schedule.spread={spread:g}", f"train.seed={seed}", f"output.dir={folder}", "tracking.wandb=off"]
    settings += [f"data.path={options.data_dir}"] if options.data_dir else []
    training = ["train.py", "--recipe", options.recipe, *options.overrides, *settings]
    evaluation = ["-m", "eval", "--checkpoint", str(folder), *data, "--speedup", *SPEEDS]
    evaluation += ["--output", str(folder / "eval")]
    for command, finished in ((training, "config.json"), (evaluation, "eval/report.json")):
        if not (folder / finished).exists():
            run_logged(command, folder.with_name(folder.name + ".log"))


if __name__ == "__main__":
    sys.exit(run_command(main))
