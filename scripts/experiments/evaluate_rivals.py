"""Evaluate what train_rivals.py trained, all alike, and print a table for each speed (docs/results.md).

    python scripts/experiments/evaluate_rivals.py --runs outputs/rivals --data-dir E2E_FOLDER --output outputs/evaluated

Each finished run in the folder is decoded at every target, with its clock at batch 1 and 8 beside the test set's, in
turns with its own full depth; a shallow model in turns with `full-depth`; a model with early exits also by confidence.
One after the other, since they are timed: leave the machine alone. What is finished is not evaluated again, and what
was cut off goes on: start it again after a stop. Beside the tables it draws rivals.png.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.files import write_whole
from eval.frontier import draw_frontier
from eval.results import FILE_NAME, Report, Row, markdown_table
from scripts.experiments.rivals import RIVALS
from scripts.experiments.variants import run_logged
from skipdecode.checkpoint import SkipConfig
from skipdecode.command import run_command
from skipdecode.errors import ConfigError

SPEEDS = (2.0, 3.0, 4.0)
TIMED = ("1", "8")
HEADS = ["trained as", "layers a token", "BLEU [95 %]", "slot errors", "batch 32", *(f"batch {size}" for size in TIMED)]
DRAWN = ("skipdecode", "skipdecode-constant", "unified", "d3", "early-termination")
DRAWN += ("shallow", "early-exit", "early-exit, calm")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", required=True, type=Path, help="the folder that train_rivals.py filled")
    parser.add_argument("--data-dir", type=Path, help="the task's folder; default: the Hub, or built in")
    parser.add_argument("--output", required=True, type=Path, help="a folder for all evaluations")
    parser.add_argument("--limit", help="only the first N prompts of the test set")
    options = parser.parse_args()
    return evaluate(options)


def evaluate(options: argparse.Namespace) -> int:
    """Evaluate every finished run and print the tables."""
    names = [name for name in RIVALS if (options.runs / name / "config.json").exists()]
    if not names:
        raise ConfigError(f"--runs is {str(options.runs)!r}: it holds no finished run of train_rivals.py")
    if "full-depth" not in names and any(RIVALS[name].as_fast_as for name in names):
        raise ConfigError(f"{options.runs} has no finished full-depth, which shallow models are measured against")
    options.output.mkdir(parents=True, exist_ok=True)
    common = ["--time-batch-size", *TIMED]
    if options.data_dir is not None:
        common += ["--data-dir", str(options.data_dir.resolve())]
    if options.limit is not None:
        common += ["--limit", options.limit]
    reports: dict[str, Report] = {}
    for name in names:
        for label, how in ways(options.runs, name).items():
            folder = (options.output / label.replace(", ", "-")).resolve()
            if not (folder / FILE_NAME).exists():
                print(label, file=sys.stderr, flush=True)
                command = ["-m", "eval", "--checkpoint", str((options.runs / name).resolve()), *how, *common]
                run_logged([*command, "--output", str(folder)], folder.with_suffix(".log"))
            reports[label] = Report.load(folder / FILE_NAME)
    text = "\n".join(line for speed in SPEEDS for line in table(reports, speed))
    write_whole(options.output / "rivals.md", text)
    print(text)
    draw_frontier(options.output / "rivals.png", drawn(reports), f"{next(iter(reports.values())).task}: rivals")
    return 0


def ways(runs: Path, name: str) -> dict[str, list[str]]:
    """How a run is decoded: a label and options of `python -m eval` for each way."""
    if RIVALS[name].as_fast_as is not None:
        return {name: ["--reference", str((runs / "full-depth").resolve())]}
    config = SkipConfig.load(runs / name)
    fastest = max(config.schedules) if config is not None and len(config.schedules) > 1 else SPEEDS[-1]
    targets = [1.0, *(speed for speed in SPEEDS if speed <= fastest)]
    if fastest < SPEEDS[-1]:
        targets.append(fastest)  # all that it can
    speeds = ["--speedup", *(f"{target:g}" for target in targets)]
    found = {name: speeds}
    if name.startswith("early-exit"):
        found[f"{name}, calm"] = ["--system", "calm", *speeds]
    return found


def table(reports: dict[str, Report], speed: float) -> list[str]:
    """Every rival at one target, and above them a model that knows nothing but full depth."""
    rows = []
    if "full-depth" in reports:
        rows.append(cells("full-depth, at 1x", reports["full-depth"].rows[0]))
    for label, report in reports.items():
        as_fast_as = RIVALS[label].as_fast_as if label in RIVALS else None
        for row in report.rows[1:]:
            target = as_fast_as if row.speedup_target is None else row.speedup_target
            if target is not None and abs(target - speed) < 0.5:
                reached = label if target == speed else f"{label} ({target:g}x)"
                rows.append(cells(reached, row))
    return [f"Target {speed:g}x:", "", *markdown_table(HEADS, rows), ""]


def cells(label: str, row: Row) -> list[str]:
    """A line of the table."""
    low, high = row.intervals["bleu"]
    star = "*" if row.p_values.get("bleu", 1) < 0.05 else ""
    slots = f"{row.scores['slot_error_rate']:.1f} %" if "slot_error_rate" in row.scores else "–"
    timed = {timing.batch_size: timing for timing in row.timings}
    speeds = [str(timed[int(size)].speedup) if int(size) in timed else "–" for size in TIMED]
    own = f"{row.wall_clock_speedup:.2f}x [{row.wall_clock_quartiles[0]:.2f}, {row.wall_clock_quartiles[1]:.2f}]"
    return [
        label,
        f"{row.mean_layers:.2f}",
        f"{row.scores['bleu']:.2f}{star} [{low:.1f}, {high:.1f}]",
        slots,
        own,
        *speeds,
    ]


def drawn(reports: dict[str, Report]) -> dict[str, Report]:
    """Those that differ most, the shallow models as one line."""
    found = dict(reports)
    shallow = [report for label, report in reports.items() if label in RIVALS and RIVALS[label].as_fast_as]
    if shallow:
        rows = [replace(report.rows[1], checkpoint="shallow") for report in shallow]
        found["shallow"] = replace(shallow[0], checkpoint="shallow", rows=[shallow[0].rows[0], *rows])
    return {label: found[label] for label in DRAWN if label in found}


if __name__ == "__main__":
    sys.exit(run_command(main))
