"""Compare spreads of the budgets, (max - min) / (max + min), by the frontiers of what is trained under them.

    python scripts/experiments/spreads.py --output outputs/spreads

Each is trained with each seed, all for as many steps as the recipe says; the frontiers are means over seeds.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.results import Report
from eval.tables import Table
from scripts.experiments.runner import SPEEDS, Experiment, make_parser, run_experiment
from scripts.experiments.variants import Variants
from skipdecode.command import run_command


def main() -> int:
    parser = make_parser(__doc__, recipe="quickstart")
    parser.add_argument("--spreads", nargs="+", type=float, default=[0.5, 0, 0.25, 0.75], metavar="S")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], metavar="N", help="of the training")
    options = parser.parse_intermixed_args()
    names = {(spread, seed): f"spread-{spread:g}-seed-{seed}" for seed in options.seeds for spread in options.spreads}
    settings = {name: (f"schedule.spread={spread:g}", f"train.seed={seed}") for (spread, seed), name in names.items()}

    def by_spread(reports: Mapping[str, Report]) -> dict[str, list[Report]]:
        found = {
            f"{spread:g}": [reports[names[spread, seed]] for seed in options.seeds if names[spread, seed] in reports]
            for spread in options.spreads
        }
        return {spread: each for spread, each in found.items() if each}

    def table(variants: Variants, reports: Mapping[str, Report]) -> list[str]:
        headers = ["spread", *(f"{speed:g}x: max to min, measured, BLEU [seeds]" for speed in SPEEDS)]
        rows = [[spread, *cells(each)] for spread, each in by_spread(reports).items()]
        return [Table(headers, rows).to_markdown()]

    def means(reports: Mapping[str, Report]) -> dict[str, Report]:
        return {f"spread {spread}": mean(each) for spread, each in by_spread(reports).items()}

    seeds = "one seed" if len(options.seeds) == 1 else f"means of {len(options.seeds)} seeds"
    made = {name: lambda variants, each=each: each for name, each in settings.items()}
    return run_experiment(options, Experiment("spreads", f"budgets of different spread, {seeds}", made, table, means))


def cells(reports: Sequence[Report]) -> list[str]:
    """Each speed of one spread over its seeds."""
    found = []
    for rows in zip(*(report.rows for report in reports), strict=True):
        bleu = [row.scores["bleu"] for row in rows]
        speed = statistics.fmean(row.wall_clock_speedup for row in rows)
        budgets = f"{rows[0].schedule['max_layers']} to {rows[0].schedule['min_layers']}"
        each = ", ".join(f"{value:.2f}" for value in bleu)
        found.append(f"{budgets}, {speed:.2f}x, {statistics.fmean(bleu):.2f} [{each}]")
    return found


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


if __name__ == "__main__":
    sys.exit(run_command(main))
