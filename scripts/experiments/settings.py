"""Compare settings of a recipe over several seeds, by scores and measured speedups.

    python scripts/experiments/settings.py --settings schedule.spread=0.5 schedule.spread=0 --output outputs/spreads
    python scripts/experiments/settings.py --settings schedule.prompt=full schedule.prompt=6 schedule.prompt=max \\
        "schedule.prompt=full schedule.over=decode" --seeds 0 1 2 --over all --output outputs/prompts

A setting is one override, or several in quotes. Each is trained with each seed, for the recipe's number of steps. In
overrides, {seed} is replaced by the seed, as in model.name_or_path=BASE-seed-{seed}. The picture shows means over
seeds. With train.validate_rows the table also has the losses of the last validation.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.results import Report, Row
from eval.score.metric import Metric
from eval.score.registry import short
from eval.tables import Table
from scripts.experiments.runner import SPEEDS, Experiment, at_speeds, make_parser, run_experiment
from scripts.experiments.variants import Variants
from skipdecode import SkipSchedule
from skipdecode.cli.process import run_command
from skipdecode.files import read_lines
from skipdecode.schedule.schedule import Over
from skipdecode.timing.interleave import Ratio
from train.tracking import VALIDATION_FILE

SEED = "{seed}"
HEADERS = ["setting", "target", "prompt layers", "max to min", "speedup (decode)", "speedup (end-to-end)"]


def main() -> int:
    parser = make_parser(__doc__, recipe="quickstart")
    parser.add_argument(
        "--settings",
        nargs="+",
        required=True,
        metavar="KEY=VALUE",
        help="settings to compare; put overrides of all runs before this option or after another one",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="seeds of the trainings")
    parser.add_argument("--over", choices=get_args(Over), default="decode", help="speedup to draw")
    parser.add_argument("--speedups", nargs="+", type=float, default=SPEEDS, metavar="X", help="targets to evaluate")
    options = parser.parse_intermixed_args()
    by_seed = [word for word in options.overrides if SEED in word]
    # The recipe itself, with which all are compared, uses the model of the first seed.
    options.overrides = [word.replace(SEED, str(options.seeds[0])) for word in options.overrides]
    names = {(each, seed): f"{each} seed {seed}" for seed in options.seeds for each in options.settings}
    options.only = options.only or list(names.values())  # so that impossible settings are errors and not skipped
    overrides = {
        name: (*(word.replace(SEED, str(seed)) for word in (*each.split(), *by_seed)), f"train.seed={seed}")
        for (each, seed), name in names.items()
    }
    made = {name: lambda variants, words=words: words for name, words in overrides.items()}

    def by_setting(reports: Mapping[str, Report]) -> dict[str, list[Report]]:
        found = {
            each: [reports[names[each, seed]] for seed in options.seeds if names[each, seed] in reports]
            for each in options.settings
        }
        return {each: several for each, several in found.items() if several}

    def table(variants: Variants, reports: Mapping[str, Report]) -> list[str]:
        metrics = short(next(iter(reports.values())).rows[0].scores)
        settings = by_setting(reports)
        rows = [[each, *line] for each, several in settings.items() for line in cells(several, metrics)]
        headers = [*HEADERS, *(metric.label for metric in metrics)]
        losses = {
            each: [last_losses(Path(report.checkpoint)) for report in several] for each, several in settings.items()
        }
        if any(each for several in losses.values() for each in several):
            headers.append("loss")
            for row in rows:
                row.append(", ".join(each.get(row[1], "–") for each in losses[row[0]]))
        return [Table(headers, rows).to_markdown()]

    def means(reports: Mapping[str, Report]) -> dict[str, Report]:
        return {each: mean(several) for each, several in by_setting(reports).items()}

    seeds = "one seed" if len(options.seeds) == 1 else f"means of {len(options.seeds)} seeds"
    experiment = Experiment(
        "settings",
        seeds,
        made,
        table,
        means,
        evaluations=lambda name, run: {name: at_speeds(options.speedups)},
        over=options.over,
    )
    return run_experiment(options, experiment)


def last_losses(run: Path) -> dict[str, str]:
    """The loss at each target, such as 2x, in a run's last validation; empty without validation."""
    path = run / VALIDATION_FILE
    if not path.exists():
        return {}
    logged = json.loads(read_lines(path)[-1])
    prefix = "eval_loss_"
    return {name.removeprefix(prefix): f"{value:.3f}" for name, value in logged.items() if name.startswith(prefix)}


def cells(reports: Sequence[Report], metrics: Sequence[Metric]) -> list[list[str]]:
    """A row for each target of one setting, with mean speedups, and mean scores followed by those of each seed."""
    found = []
    for rows, average in zip(zip(*(report.rows for report in reports), strict=True), mean(reports).rows, strict=True):
        # Schedules may differ, because each is solved for the output lengths of its run.
        schedules = [SkipSchedule.from_dict(row.schedule) for row in rows]
        prompts = dict.fromkeys(f"{schedule.prompt_depth}" for schedule in schedules)
        layers = dict.fromkeys(f"{schedule.max_layers} to {schedule.min_layers}" for schedule in schedules)
        line = [rows[0].label, ", ".join(prompts), ", ".join(layers)]
        line += [f"{average.speed(over).median:.2f}x" for over in get_args(Over)]
        for metric in metrics:
            each = ", ".join(metric.show(row.scores[metric.name]) for row in rows)
            line.append(f"{metric.show(average.scores[metric.name])} [{each}]")
        found.append(line)
    return found


def mean(reports: Sequence[Report]) -> Report:
    """A report with the mean speedups and scores of several; all other values are those of the first."""
    return replace(reports[0], rows=[mean_row(rows) for rows in zip(*(report.rows for report in reports), strict=True)])


def mean_row(rows: Sequence[Row]) -> Row:
    """A row of the mean report."""

    def speed(over: Over) -> Ratio:
        return Ratio(*map(statistics.fmean, zip(*(astuple(row.speed(over)) for row in rows), strict=True)))

    decoding = speed("decode")
    return replace(
        rows[0],
        mean_layers=statistics.fmean(row.mean_layers for row in rows),
        scores={name: statistics.fmean(row.scores[name] for row in rows) for name in rows[0].scores},
        intervals={},
        wall_clock_speedup=decoding.median,
        wall_clock_quartiles=(decoding.lower, decoding.upper),
        whole_speedup=speed("all"),
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
