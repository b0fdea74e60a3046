"""Compare methods to sample schedules, with and without self-distillation, at equal work (docs/research/objectives.md).

    python scripts/experiments/objectives.py --data-dir E2E_FOLDER --output outputs/objectives --epochs 4 \\
        schedule.prompt=full schedule.over=decode schedule.decay=linear data.options.holdout=0

Each is trained for the work (positions times layers) that the distilled sandwich needs for --epochs.
"""

import sys
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.results import Report
from eval.tables import Table
from scripts.experiments.runner import SPEEDS, Experiment, make_parser, run_experiment
from scripts.experiments.variants import Variants
from skipdecode.cli.process import run_command

ONE, SANDWICH = "schedule.sampling=one", "schedule.sampling=sandwich"
RANGE = ("schedule.speedups=null", "schedule.speedup_range=[1,4]")
APART, HALF, DISTILLED = (f"optim.distillation={share}" for share in (0, 0.5, 1))


def _listed(*speedups: int) -> tuple[str, ...]:
    return (f"schedule.speedups={list(speedups)}", "schedule.speedup_range=null")


LIST = _listed(1, 2, 3, 4)
OBJECTIVES = {
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
    parser = make_parser(__doc__)
    parser.add_argument(
        "--epochs", type=float, default=6, help="epochs of the distilled sandwich; all do as much work (default 6)"
    )
    options = parser.parse_intermixed_args()

    @cache
    def work(name: str, variants: Variants) -> float:
        return variants.work(OBJECTIVES[name])

    def steps(name: str, variants: Variants) -> int:
        reference = options.epochs * len(variants.prepared.encoded.rows) / variants.prepared.rows_a_step
        return round(reference * work("sandwich, distilled", variants) / work(name, variants))

    def overrides(name: str, variants: Variants) -> tuple[str, ...]:
        return (*OBJECTIVES[name], "train.epochs=1", f"train.max_steps={steps(name, variants)}")

    def table(variants: Variants, reports: Mapping[str, Report]) -> list[str]:
        rows = [[name, str(steps(name, variants)), *cells(report)] for name, report in reports.items()]
        headers = ["objective", "steps", *(f"BLEU at {speed:g}x" for speed in SPEEDS), "lowest, relative to 1x"]
        return [Table(headers, rows).to_markdown()]

    made = {name: partial(overrides, name) for name in OBJECTIVES}
    return run_experiment(options, Experiment("objectives", "objectives at equal work", made, table, steady))


def cells(report: Report) -> list[str]:
    """BLEU at each target, and the lowest as a percentage of that at 1x."""
    bleu = [row.scores["bleu"] for row in report.rows]
    lowest = f"{100 * min(bleu[1:]) / bleu[0]:.1f} %" if bleu[0] >= 1 else "–"  # meaningless if full depth fails
    return [*(f"{value:.2f}" for value in bleu), lowest]


def steady(reports: Mapping[str, Report]) -> dict[str, Report]:
    """The reports that lose less than half of their BLEU at every target; the others would dominate the picture."""
    bleu = {name: [row.scores["bleu"] for row in report.rows] for name, report in reports.items()}
    return {name: report for name, report in reports.items() if min(bleu[name]) > max(bleu[name]) / 2 > 10}


if __name__ == "__main__":
    sys.exit(run_command(main))
