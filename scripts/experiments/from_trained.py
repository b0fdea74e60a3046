"""Start from a model trained at full depth and make it faster: by skipping layers, or as a shallow model.

    python scripts/experiments/from_trained.py --recipe e2e-tiny --data-dir E2E_FOLDER --output outputs/from-trained

With each seed the recipe is first trained at full depth. From that model each method is trained for --shares of the
steps: a checkpoint that skips layers at all of the recipe's targets, or a shallow model that reaches one of --speeds.
The table has means over seeds with standard deviations, and for each method the difference of its scores from those of
the shallow model with evenly spaced layers and the same seeds, with a bootstrap interval over prompts and seeds.
"""

import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.results import Report, Row
from eval.score.bootstrap import interval, over_seeds
from eval.score.metric import Metric
from eval.score.predictions import read_predictions
from eval.score.registry import PART, short
from eval.score.scores import Scores, score
from eval.tables import Table
from scripts.experiments.baselines import FULL_DEPTH
from scripts.experiments.runner import Experiment, at_speeds, evaluated_in, folder_name, make_parser, run_experiment
from scripts.experiments.settings import mean, mean_row
from scripts.experiments.variants import Variants
from skipdecode.cli.process import run_command
from skipdecode.errors import ConfigError

BASE = "full-depth"
SKIPPING: dict[str, tuple[str, ...]] = {
    "linear": ("schedule.decay=linear",),
    "constant": ("schedule.decay=constant",),
    "early-termination": ("schedule.decay=linear", "schedule.placement=bottom"),
    "unified": ("schedule.placement=even", "schedule.decay=constant"),
    "linear-half-distilled": ("schedule.decay=linear", "optim.distillation=0.5"),
}
# Defaults of settings that have no effect with a pretrained model and a number of steps.
DEFAULTS = ("model.vocab_size=512", "train.epochs=1")
KEPT = ("even", "top", "ends")
METRICS = ("bleu", "slot_error_rate")
HEADERS = ["steps", "method", "seeds", "mean layers", "speedup (decode)", "speedup (end-to-end)"]
HEADERS += ["BLEU ± deviation over seeds [95 %]", "SER, % ± deviation over seeds [95 %]"]
HEADERS += ["BLEU minus shallow-even", "SER minus shallow-even"]


@dataclass(frozen=True)
class Method:
    """A method that starts from the trained model.

    Attributes:
        kind: `full-depth`, a key of SKIPPING, or `shallow-` followed by the placement of the kept layers.
        share: number of steps, as a share of the trained model's.
        speed: target speedup of a shallow model; None for a model that decodes at any.
        seed: seed of the training, and of the trained model.
        layers: number of layers of a shallow model; None: those that reach `speed`.
    """

    kind: str
    share: float
    speed: float | None = None
    seed: int = 0
    layers: int | None = None

    @property
    def name(self) -> str:
        made_for = f"-{self.speed:g}x" if self.speed is not None else ""
        return f"{self.kind}{made_for}-{self.share:g} seed {self.seed}"

    def overrides(self, base: Path, rate: float | None, variants: Variants) -> tuple[str, ...]:
        """The overrides of the recipe."""
        optim, steps = variants.recipe().optim, max(1, round(self.share * variants.prepared.steps))
        # The config is that of the trained model, because a shape's sizes can't be set with a pretrained model.
        start = ("model.shape=null", "model.config=null", f"model.name_or_path={base}", *DEFAULTS)
        start += (f"train.max_steps={steps}",)
        start += (f"optim.learning_rate={optim.learning_rate / 3 if rate is None else rate:g}",)
        start += (f"optim.warmup_steps={min(optim.warmup_steps, steps // 10)}", f"train.seed={self.seed}")
        if self.kind == BASE:
            return (*start, *FULL_DEPTH)
        if self.speed is None:
            return (*start, *SKIPPING[self.kind])
        layers = variants.layers_as_fast(self.speed) if self.layers is None else self.layers
        return (*start, *FULL_DEPTH, f"model.layers={layers}", f"model.keep={self.kind.removeprefix('shallow-')}")

    def row(self, report: Report, speed: float) -> Row | None:
        """The row of a report to compare at a target speedup, or None."""
        if self.kind == BASE:
            return report.rows[0]
        if self.speed is not None:
            return report.rows[1] if self.speed == speed else None
        return next((row for row in report.rows if row.speedup_target == speed), None)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="seeds of the trainings")
    parser.add_argument(
        "--shares", nargs="+", type=float, default=[0.05, 0.2, 1.0], metavar="S", help="numbers of steps, as shares"
    )
    parser.add_argument("--speeds", nargs="+", type=float, default=[3.0], metavar="X", help="targets to compare at")
    parser.add_argument("--rate", type=float, metavar="R", help="peak learning rate (default: a third of the recipe's)")
    parser.add_argument(
        "--layers", type=int, metavar="N", help="layers of shallow models (default: those that reach --speeds)"
    )
    options = parser.parse_intermixed_args()
    if options.rate is not None and not options.rate > 0:
        raise ConfigError(f"--rate is {options.rate:g}: it must be above 0")
    if options.layers is not None and options.layers < 1:
        raise ConfigError(f"--layers is {options.layers}: it must be at least 1")
    bases = {seed: f"{BASE} seed {seed}" for seed in options.seeds}
    runs = {seed: options.output.resolve() / folder_name(name) for seed, name in bases.items()}
    methods: dict[str, Method] = {}
    for seed, share in product(options.seeds, options.shares):
        several = [Method(kind, share, seed=seed) for kind in (*SKIPPING, BASE)]
        for speed, keep in product(options.speeds, KEPT):
            several.append(Method(f"shallow-{keep}", share, speed, seed, options.layers))
        methods |= {method.name: method for method in several}

    def evaluations(name: str, run: Path) -> dict[str, list[str]]:
        if name not in methods or methods[name].kind == BASE:
            return {name: at_speeds([1.0])}
        if methods[name].speed is not None:
            return {name: ["--reference", str(runs[methods[name].seed])]}
        return {name: at_speeds([1.0, *options.speeds])}

    def table(variants: Variants, reports: Mapping[str, Report]) -> list[str]:
        def scored(name: str, row: Row) -> tuple[Row, Scores]:
            folder = evaluated_in(options.output, name) / "predictions"
            lines = read_predictions(folder / f"{row.label}.jsonl").values()
            texts = [line.prediction for line in lines]
            meanings = [line.meaning or line.prompt for line in lines]
            known = {"meanings": meanings, "convention": variants.task.convention}
            references = [line.references for line in lines]
            return row, score(texts, references, METRICS, **known)  # type: ignore[arg-type]

        whole, lines = variants.prepared.steps, []
        parts = [metric.label for metric in of_parts(next(iter(reports.values())).rows[0])]
        starts = {seed: scored(name, reports[name].rows[0]) for seed, name in bases.items() if name in reports}
        for speed in options.speeds:
            rows = [[f"0 of {whole}", "(at 1x)", *cells(starts, {})]] if starts else []
            for share in options.shares:
                found: dict[str, dict[int, tuple[Row, Scores]]] = {}
                for name, method in methods.items():
                    if (
                        method.share == share
                        and name in reports
                        and (row := method.row(reports[name], speed)) is not None
                    ):
                        found.setdefault(method.kind, {})[method.seed] = scored(name, row)
                for kind, each in found.items():
                    against = found.get("shallow-even", {}) if kind != "shallow-even" else {}
                    label = f"{kind}{' (at 1x)' * (kind == BASE)}"
                    rows.append([f"{max(1, round(share * whole))}", label, *cells(each, against)])
            lines += [f"At {speed:g}x:", "", Table([*HEADERS, *parts], rows).to_markdown(), ""]
        return lines

    def drawn(reports: Mapping[str, Report]) -> dict[str, Report]:
        """The means over seeds of the checkpoints that skip layers, which have several targets."""
        found: dict[str, list[Report]] = {}
        for name, method in methods.items():
            if name in reports and len(reports[name].rows) > 1 and reports[name].reference is None:
                found.setdefault(f"{method.kind}-{method.share:g}", []).append(reports[name])
        return {name: mean(several) for name, several in found.items()}

    made = {name: lambda _, seed=seed: (*FULL_DEPTH, f"train.seed={seed}") for seed, name in bases.items()}
    made |= {name: partial(method.overrides, runs[method.seed], options.rate) for name, method in methods.items()}
    title, starts = "from a trained model", tuple(bases.values())
    experiment = Experiment(
        "from_trained", title, made, table, drawn, evaluations=evaluations, starts=starts, metrics=METRICS
    )
    return run_experiment(options, experiment)


def cells(each: Mapping[int, tuple[Row, Scores]], against: Mapping[int, tuple[Row, Scores]]) -> list[str]:
    """Mean speedups and scores over seeds, and the scores' differences from those of `against`, with intervals."""
    average = mean_row([row for row, _ in each.values()])
    found = [f"{len(each)}", f"{average.mean_layers:.2f}", str(average.speed("decode")), str(average.speed("all"))]
    for name in METRICS:
        values = [scores.values[name] for _, scores in each.values()]
        deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        low, high = interval(over_seeds([scores.resampled[name] for _, scores in each.values()]))
        found.append(f"{statistics.fmean(values):.2f}{deviation} [{low:.1f}, {high:.1f}]")
    pairs = [(scores, against[seed][1]) for seed, (_, scores) in each.items() if seed in against]
    for name in METRICS:
        if not pairs:
            found.append("–")
            continue
        difference = statistics.fmean(scores.values[name] - other.values[name] for scores, other in pairs)
        low, high = interval(over_seeds([scores.resampled[name] - other.resampled[name] for scores, other in pairs]))
        found.append(f"{difference:+.2f} [{low:+.2f}, {high:+.2f}]")
    return found + [metric.show(average.scores[metric.name]) for metric in of_parts(average)]


def of_parts(row: Row) -> list[Metric]:
    """The metrics of parts of the test set, such as WebNLG's seen categories."""
    return [metric for metric in short(row.scores) if PART in metric.name]


if __name__ == "__main__":
    sys.exit(run_command(main))
