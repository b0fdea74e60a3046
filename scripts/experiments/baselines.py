"""Train SkipDecode and its baselines, each a change of one recipe, and measure all alike (docs/research/baselines.md).

    python scripts/experiments/baselines.py schedule.decay=linear schedule.prompt=full schedule.over=decode \\
        --recipe e2e-tiny --data-dir E2E_FOLDER --output outputs/baselines

All are trained on the same rows for the same number of steps. They are decoded at every target and timed at batch sizes
32, 1 and 8, interleaved with their own full depth; a shallow model is interleaved with `full-depth`, and a model with
early exits is also decoded by confidence (CALM). A baseline that can't reach the recipe's targets is skipped with a
message; --only NAME schedule.speedup_range=[1,3.5] trains it for other targets.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.results import Report, Row
from eval.tables import Table
from scripts.experiments.runner import SPEEDS, Experiment, at_speeds, make_parser, run_experiment
from scripts.experiments.variants import Variants
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.cli.process import run_command
from skipdecode.errors import ConfigError

TIMED = ("32", "1", "8")
HEADERS = ["trained as", "mean layers", "BLEU [95 %]", "slot error rate", *(f"speedup, batch {size}" for size in TIMED)]
DRAWN = ["skipdecode", "skipdecode-constant", "unified", "d3", "early-termination", "shallow"]
DRAWN += ["early-exit", "early-exit, calm"]
# Full depth in every step, without the settings that only apply to skipping.
FULL_DEPTH = ("schedule.speedups=[1]", *(f"schedule.{key}=null" for key in ("speedup_range", "files", "weights")))
FULL_DEPTH += ("schedule.sampling=one", "schedule.prompt_stop=null")
FULL_DEPTH += ("optim.distillation=0", "optim.depth_weight_power=0")
LAYERSKIP = (*FULL_DEPTH, "optim.exits=rotating", "optim.layer_dropout=0.1")
EXITS = (*FULL_DEPTH, "optim.exits=all", "optim.depth_weight_power=1")


@dataclass(frozen=True)
class Baseline:
    """A method to train and decode.

    Attributes:
        description: one line.
        overrides: overrides of the recipe.
        as_fast_as: target speedup of a shallow model, which gets the number of layers that reaches it; else None.
    """

    description: str
    overrides: tuple[str, ...] = ()
    as_fast_as: float | None = None

    def resolve(self, variants: Variants) -> tuple[str, ...]:
        """All overrides, with the number of layers of a shallow model. Raises ConfigError for an unreachable target."""
        if self.as_fast_as is None:
            return self.overrides
        return (*self.overrides, f"model.layers={variants.layers_as_fast(self.as_fast_as)}")


def _skipdecode(description: str, *overrides: str) -> Baseline:
    return Baseline(description, tuple(f"schedule.{override}" for override in overrides))


BASELINES: dict[str, Baseline] = {
    "full-depth": Baseline("every layer in every step, without skipping", FULL_DEPTH),
    "skipdecode": Baseline("the recipe as it is"),
    "skipdecode-prompt-max": _skipdecode("prompts run the layers of the largest budget", "prompt=max"),
    "skipdecode-constant": _skipdecode("constant schedule", "decay=constant"),
    "skipdecode-power": _skipdecode("late decay, a power of the position", "decay=power"),
    "skipdecode-exponential": _skipdecode("early, exponential decay", "decay=exponential"),
    "skipdecode-cosine": _skipdecode("decay along half a cosine", "decay=cosine"),
    "skipdecode-step": _skipdecode("decay in plateaus", "decay=step"),
    "early-termination": _skipdecode("the lowest layers run, not the highest", "placement=bottom"),
    "warmup-2": _skipdecode("the two lowest layers always run", "warmup_layers=2"),
    "warmup-3": _skipdecode("the three lowest layers always run", "warmup_layers=3"),
    "unified": _skipdecode("Unified Layer Skipping: constant, spread evenly", "placement=even", "decay=constant"),
    "d3": _skipdecode("D3: exponential decay, both ends of the stack run", "placement=ends", "decay=exponential"),
    "shallow-2x": Baseline("a shallow model that is predicted to reach 2x", FULL_DEPTH, as_fast_as=2),
    "shallow-3x": Baseline("a shallow model that is predicted to reach 3x", FULL_DEPTH, as_fast_as=3),
    "shallow-4x": Baseline("a shallow model that is predicted to reach 4x", FULL_DEPTH, as_fast_as=4),
    "layerskip": Baseline("LayerSkip: layer dropout, and exits that take turns; early exit", LAYERSKIP),
    "early-exit": Baseline(
        "multi-layer early exit: a loss after each layer, as in CALM", (*EXITS, "optim.distillation=0")
    ),
    "early-exit-distilled": Baseline("the same, each exit taught by the last", (*EXITS, "optim.distillation=1")),
}


def main() -> int:
    names = "\n".join(f"  {name:<24}{baseline.description}" for name, baseline in BASELINES.items())
    options = make_parser(__doc__, epilog=f"baselines:\n{names}").parse_intermixed_args()
    overrides = {name: baseline.resolve for name, baseline in BASELINES.items()}
    return run_experiment(options, Experiment("baselines", "baselines", overrides, tables, drawn, evaluations))


def evaluations(name: str, run: Path) -> dict[str, list[str]]:
    """Options of `python -m eval` for each evaluation of a run, by label."""
    timed = ["--time-batch-size", *TIMED]
    if BASELINES[name].as_fast_as is not None:
        full_depth = run.with_name("full-depth")
        if not (full_depth / "config.json").exists():
            raise ConfigError(f"{full_depth} isn't a finished run: shallow models are measured against it")
        return {name: ["--reference", str(full_depth), *timed]}
    config = SkipConfig.load(run)
    fastest = max(config.schedules) if config is not None and len(config.schedules) > 1 else SPEEDS[-1]
    speeds = at_speeds(sorted({*(speed for speed in SPEEDS if speed <= fastest), min(fastest, SPEEDS[-1])}))
    found = {name: [*speeds, *timed]}
    if name.startswith("early-exit"):
        found[f"{name}, calm"] = ["--system", "calm", *speeds, *timed]
    return found


def tables(variants: Variants, reports: Mapping[str, Report]) -> list[str]:
    """A table for each target, with the full-depth model first and every baseline after it."""
    lines: list[str] = []
    for speed in SPEEDS[1:]:
        rows = [cells("full-depth, at 1x", reports["full-depth"].rows[0])] if "full-depth" in reports else []
        for label, report in reports.items():
            as_fast_as = BASELINES[label].as_fast_as if label in BASELINES else None
            for row in report.rows[1:]:
                target = as_fast_as if row.speedup_target is None else row.speedup_target
                if target is not None and speed == min(SPEEDS[::-1], key=lambda each: abs(target - each)):
                    rows.append(cells(label if target == speed else f"{label} ({target:g}x)", row))
        lines += [f"Target {speed:g}x:", "", Table(HEADERS, rows).to_markdown(), ""]
    return lines


def cells(label: str, row: Row) -> list[str]:
    """A row of the table."""
    low, high = row.intervals["bleu"]
    star = "*" if row.p_values.get("bleu", 1) < 0.05 else ""
    slots = f"{row.scores['slot_error_rate']:.1f} %" if "slot_error_rate" in row.scores else "–"
    timed = {timing.batch_size: timing for timing in row.timings}
    speeds = [str(timed[int(size)].speedup) if int(size) in timed else "–" for size in TIMED]
    bleu = f"{row.scores['bleu']:.2f}{star} [{low:.1f}, {high:.1f}]"
    return [label, f"{row.mean_layers:.2f}", bleu, slots, *speeds]


def drawn(reports: Mapping[str, Report]) -> dict[str, Report]:
    """The reports to draw, with the shallow models joined into one line."""
    found = dict(reports)
    shallow = [report for label, report in reports.items() if label in BASELINES and BASELINES[label].as_fast_as]
    if shallow:
        rows = [replace(report.rows[1], checkpoint="shallow") for report in shallow]
        found["shallow"] = replace(shallow[0], checkpoint="shallow", rows=[shallow[0].rows[0], *rows])
    return {label: found[label] for label in DRAWN if label in found}


if __name__ == "__main__":
    sys.exit(run_command(main))
