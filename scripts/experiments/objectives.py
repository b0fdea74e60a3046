"""Ways to sample schedules, with and without self-distillation, compared by their frontiers at equal work.

    python scripts/experiments/objectives.py --data-dir E2E_FOLDER --output outputs/objectives

Trains e2e-tiny under each, all for as much work (passes of a column through a layer) as the distilled sandwich does in
--epochs, evaluates each at 1x to 4x, prints a table, and draws the frontiers into objectives.png. What is finished is
not run again: start it again to go on after a stop. Runs are independent: two at a time with OMP_NUM_THREADS=1 take
half as long on two cores (--jobs 2).
"""

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.frontier import draw_frontier
from eval.results import Report
from scripts.experiments.variants import Variants, run_jobs, run_logged
from skipdecode.command import run_command

SPEEDS = ["1", "2", "3", "4"]
ONE, SANDWICH = "schedule.sampling=one", "schedule.sampling=sandwich"
RANGE = ("schedule.speedups=null", "schedule.speedup_range=[1,4]")
APART, HALF, DISTILLED = (f"optim.distillation={share}" for share in (0, 0.5, 1))


def _listed(*speedups: int) -> tuple[str, ...]:
    return (f"schedule.speedups={list(speedups)}", "schedule.speedup_range=null")


LIST = _listed(1, 2, 3, 4)
VARIANTS = {
    "full depth alone": (ONE, *_listed(1), APART),
    "fixed 3x": (ONE, *_listed(3), APART),
    "list": (ONE, *LIST, APART),
    "list, half distilled": (ONE, *LIST, HALF),
    "list, distilled": (ONE, *LIST, DISTILLED),
    "range": (ONE, *RANGE, APART),
    "range, half distilled": (ONE, *RANGE, HALF),
    "sandwich": (SANDWICH, *LIST, APART),
    "sandwich, distilled": (SANDWICH, *LIST, DISTILLED),
    "sandwich of a range, distilled": (SANDWICH, *RANGE, DISTILLED),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument(
        "--epochs", type=float, default=6, help="of the distilled sandwich, whose work all do (default 6)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", nargs="+", choices=sorted(VARIANTS), help="default: all")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for all of them")
    options = parser.parse_intermixed_args()
    options.output.mkdir(parents=True, exist_ok=True)
    common = (f"data.path={options.data_dir.resolve()}", "tracking.wandb=off", *options.overrides)
    variants = Variants("e2e-tiny", common)
    names = options.only or list(VARIANTS)
    rows = 32  # of the recipe's batch
    most = variants.work(VARIANTS["sandwich, distilled"])
    budget = options.epochs * len(variants.prepared.encoded.rows) / rows * most
    steps = {name: round(budget / variants.work(VARIANTS[name])) for name in names}
    if run_jobs({name: partial(run, options, variants, name, steps[name]) for name in names}, options.jobs):
        return 1
    reports = {name: Report.load(options.output / slug(name) / "eval" / "report.json") for name in names}
    frontiers = {name: report for name, report in reports.items() if decodes_everywhere(report)}
    draw_frontier(options.output / "objectives.png", frontiers or reports, "e2e: ways to train, at equal work")
    print("| trained by | steps | " + " | ".join(f"{speed}x" for speed in SPEEDS) + " | worst of 1x's |")
    print("| --- |" + " ---: |" * (len(SPEEDS) + 2))
    for name, report in reports.items():
        bleu = [row.scores["bleu"] for row in report.rows]
        cells = " | ".join(f"{value:.2f}" for value in bleu)
        worst = f"{100 * min(bleu[1:]) / bleu[0]:.1f} %" if bleu[0] >= 1 else "–"  # of a model that can't do 1x
        print(f"| {name} | {steps[name]} | {cells} | {worst} |")
    return 0


def decodes_everywhere(report: Report) -> bool:
    """Whether no speed lost half of the BLEU of another: the rest would squash the picture, and is in the table."""
    bleu = [row.scores["bleu"] for row in report.rows]
    return min(bleu) > max(bleu) / 2 > 10


def slug(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def run(options: argparse.Namespace, variants: Variants, name: str, steps: int) -> None:
    folder, log = options.output.resolve() / slug(name), options.output / f"{slug(name)}.log"
    variants.train([*VARIANTS[name], f"train.max_steps={steps}"], folder, log)
    if not (folder / "eval" / "report.json").exists():
        evaluation = ["-m", "eval", "--checkpoint", str(folder), "--data-dir", str(options.data_dir.resolve())]
        run_logged([*evaluation, "--speedup", *SPEEDS, "--output", str(folder / "eval")], log)


if __name__ == "__main__":
    sys.exit(run_command(main))
