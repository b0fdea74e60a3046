"""Train the baselines of SkipDecode, each a change of one recipe, and measure all alike (docs/research/baselines.md).

    python scripts/experiments/rivals.py schedule.decay=linear schedule.prompt=full schedule.over=decode \\
        --recipe e2e-tiny --data-dir E2E_FOLDER --output outputs/rivals

All train on the same rows for as many steps, and are decoded at every target, timed at batch 32, 1 and 8: in turns with
their own full depth; a shallow model in turns with `full-depth`; a model with early exits also by confidence.
What can't reach the recipe's targets is named and left out;
--only NAME schedule.speedup_range=[1,3.5] trains it for others.
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
HEADERS = ["trained as", "layers a token", "BLEU [95 %]", "slot errors", *(f"batch {size}" for size in TIMED)]
DRAWN = ["skipdecode", "skipdecode-constant", "unified", "d3", "early-termination", "shallow"]
DRAWN += ["early-exit", "early-exit, calm"]
# Full depth in every step, whatever the recipe draws from, and without what skipping alone has.
FULL_DEPTH = ("schedule.speedups=[1]", *(f"schedule.{key}=null" for key in ("speedup_range", "files", "weights")))
FULL_DEPTH += ("schedule.sampling=one", "schedule.prompt_stop=null")
FULL_DEPTH += ("optim.distillation=0", "optim.depth_weight_power=0")
EXITS = (*FULL_DEPTH, "optim.exits=all", "optim.depth_weight_power=1")


@dataclass(frozen=True)
class Rival:
    """A way to train and decode.

    Attributes:
        what: one line.
        overrides: of the recipe.
        as_fast_as: a target; the model is a shallow one, of as many layers as are as fast.
    """

    what: str
    overrides: tuple[str, ...] = ()
    as_fast_as: float | None = None

    def resolve(self, variants: Variants) -> tuple[str, ...]:
        """All overrides, with the layers of a shallow model. Raises ConfigError for a target out of reach."""
        if self.as_fast_as is None:
            return self.overrides
        return (*self.overrides, f"model.layers={variants.layers_as_fast(self.as_fast_as)}")


def _skipdecode(what: str, *overrides: str) -> Rival:
    return Rival(what, tuple(f"schedule.{override}" for override in overrides))


RIVALS: dict[str, Rival] = {
    "full-depth": Rival("every layer in every step: no skipping is learnt", FULL_DEPTH),
    "skipdecode": Rival("the recipe as it is"),
    "skipdecode-prompt-max": _skipdecode("the prompt runs the layers of the largest budget, not all", "prompt=max"),
    "skipdecode-constant": _skipdecode("the budget doesn't fall", "decay=constant"),
    "skipdecode-power": _skipdecode("it falls late, as a power of the position", "decay=power"),
    "skipdecode-exponential": _skipdecode("it falls early, exponentially", "decay=exponential"),
    "skipdecode-cosine": _skipdecode("it falls along half a cosine", "decay=cosine"),
    "skipdecode-step": _skipdecode("it falls in plateaus", "decay=step"),
    "early-termination": _skipdecode("the layers that run are the lowest, not the highest", "placement=bottom"),
    "warmup-2": _skipdecode("two layers at the bottom always run", "warmup_layers=2"),
    "warmup-3": _skipdecode("three layers at the bottom always run", "warmup_layers=3"),
    "unified": _skipdecode("Unified Layer Skipping: a constant budget, spread", "placement=even", "decay=constant"),
    "d3": _skipdecode("D3: an exponential decay, both ends of the stack kept", "placement=ends", "decay=exponential"),
    "shallow-2x": Rival("a model of as many layers as the mean budget at 2x", FULL_DEPTH, as_fast_as=2),
    "shallow-3x": Rival("a model of as many layers as the mean budget at 3x", FULL_DEPTH, as_fast_as=3),
    "shallow-4x": Rival("a model of as many layers as the mean budget at 4x", FULL_DEPTH, as_fast_as=4),
    "early-exit": Rival("multi-layer early exit: a loss after each layer, as CALM", (*EXITS, "optim.distillation=0")),
    "early-exit-distilled": Rival("the same, each exit taught by the last", (*EXITS, "optim.distillation=1")),
}


def main() -> int:
    names = "\n".join(f"  {name:<24}{rival.what}" for name, rival in RIVALS.items())
    options = make_parser(__doc__, epilog=f"rivals:\n{names}").parse_intermixed_args()
    overrides = {name: rival.resolve for name, rival in RIVALS.items()}
    return run_experiment(options, Experiment("rivals", "rivals", overrides, tables, drawn, ways))


def ways(name: str, run: Path) -> dict[str, list[str]]:
    """Options of `python -m eval` for each way in which a run is decoded, by label."""
    timed = ["--time-batch-size", *TIMED]
    if RIVALS[name].as_fast_as is not None:
        full_depth = run.with_name("full-depth")
        if not (full_depth / "config.json").exists():
            raise ConfigError(f"{full_depth} is no finished run: shallow models are measured against it")
        return {name: ["--reference", str(full_depth), *timed]}
    config = SkipConfig.load(run)
    fastest = max(config.schedules) if config is not None and len(config.schedules) > 1 else SPEEDS[-1]
    speeds = at_speeds(sorted({*(speed for speed in SPEEDS if speed <= fastest), min(fastest, SPEEDS[-1])}))
    found = {name: [*speeds, *timed]}
    if name.startswith("early-exit"):
        found[f"{name}, calm"] = ["--system", "calm", *speeds, *timed]
    return found


def tables(variants: Variants, reports: Mapping[str, Report]) -> list[str]:
    """A table for each target: every rival, and above them a model that knows nothing but full depth."""
    lines: list[str] = []
    for speed in SPEEDS[1:]:
        rows = [cells("full-depth, at 1x", reports["full-depth"].rows[0])] if "full-depth" in reports else []
        for label, report in reports.items():
            as_fast_as = RIVALS[label].as_fast_as if label in RIVALS else None
            for row in report.rows[1:]:
                target = as_fast_as if row.speedup_target is None else row.speedup_target
                if target is not None and speed == min(SPEEDS[::-1], key=lambda each: abs(target - each)):
                    rows.append(cells(label if target == speed else f"{label} ({target:g}x)", row))
        lines += [f"Target {speed:g}x:", "", Table(HEADERS, rows).to_markdown(), ""]
    return lines


def cells(label: str, row: Row) -> list[str]:
    """A line of the table."""
    low, high = row.intervals["bleu"]
    star = "*" if row.p_values.get("bleu", 1) < 0.05 else ""
    slots = f"{row.scores['slot_error_rate']:.1f} %" if "slot_error_rate" in row.scores else "–"
    timed = {timing.batch_size: timing for timing in row.timings}
    speeds = [str(timed[int(size)].speedup) if int(size) in timed else "–" for size in TIMED]
    bleu = f"{row.scores['bleu']:.2f}{star} [{low:.1f}, {high:.1f}]"
    return [label, f"{row.mean_layers:.2f}", bleu, slots, *speeds]


def drawn(reports: Mapping[str, Report]) -> dict[str, Report]:
    """The reports that differ most, the shallow models as one line."""
    found = dict(reports)
    shallow = [report for label, report in reports.items() if label in RIVALS and RIVALS[label].as_fast_as]
    if shallow:
        rows = [replace(report.rows[1], checkpoint="shallow") for report in shallow]
        found["shallow"] = replace(shallow[0], checkpoint="shallow", rows=[shallow[0].rows[0], *rows])
    return {label: found[label] for label in DRAWN if label in found}


if __name__ == "__main__":
    sys.exit(run_command(main))
