"""From one trained model at full depth to faster ones: what skips layers, and shallow models that keep some of them.

    python scripts/experiments/from_trained.py --recipe e2e-tiny --data-dir E2E_FOLDER --output outputs/from-trained

With each seed the recipe is trained at full depth first. From that model each way is trained for --shares of its steps:
a checkpoint that skips, for all of the recipe's speeds, or a shallow model that is as fast as those are at one of
--speeds. The table has means over the seeds with the standard deviation. Beside each way's scores stands how far they
are from those of the shallow model of even layers, of the same seeds, by the bootstrap over prompts and seeds.
"""

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.results import Report, Row
from eval.score.bootstrap import interval, over_seeds
from eval.score.metric import Metric
from eval.score.predictions import read_predictions
from eval.score.registry import PART, short
from eval.score.scores import Scores, score
from eval.tables import Table
from scripts.experiments.rivals import FULL_DEPTH
from scripts.experiments.runner import Experiment, at_speeds, evaluated_in, folder_name, make_parser, run_experiment
from scripts.experiments.settings import mean, mean_row
from scripts.experiments.variants import Variants
from skipdecode.command import run_command

BASE = "full-depth"
SKIPPING: dict[str, tuple[str, ...]] = {
    "linear": ("schedule.decay=linear",),
    "constant": ("schedule.decay=constant",),
    "early-termination": ("schedule.decay=linear", "schedule.placement=bottom"),
    "unified": ("schedule.placement=even", "schedule.decay=constant"),
    "linear-half-distilled": ("schedule.decay=linear", "optim.distillation=0.5"),
}
KEPT = ("even", "top", "ends")
METRICS = ("bleu", "slot_error_rate")
HEADERS = ["steps", "trained on as", "seeds", "layers a token", "decoding", "whole"]
HEADERS += ["BLEU ± its deviation over seeds [95 %]", "slot errors, % ± [95 %]"]
HEADERS += ["BLEU less shallow-even's", "slot errors less shallow-even's"]


@dataclass(frozen=True)
class Way:
    """What is made of the trained model.

    Attributes:
        kind: `full-depth`, a name of SKIPPING, or `shallow-` and which layers stay.
        share: of the trained model's steps.
        speed: that a shallow model is made for; None of one that decodes at any.
    """

    kind: str
    share: float
    speed: float | None = None

    @property
    def name(self) -> str:
        made_for = f"-{self.speed:g}x" if self.speed is not None else ""
        return f"{self.kind}{made_for}-{self.share:g}"

    def overrides(self, base: Path, rate: float | None, seed: int, variants: Variants) -> tuple[str, ...]:
        """Of the recipe."""
        optim, steps = variants.recipe().optim, max(1, round(self.share * full_steps(variants)))
        # The config is the trained model's own, dropout and all: a shape's sizes can't be asked for again.
        start = ("model.shape=null", "model.config=null", f"model.name_or_path={base}", f"train.max_steps={steps}")
        start += (f"optim.learning_rate={rate or optim.learning_rate / 3:g}",)
        start += (f"optim.warmup_steps={min(optim.warmup_steps, steps // 10)}", f"train.seed={seed}")
        if self.kind == BASE:
            return (*start, *FULL_DEPTH)
        if self.speed is None:
            return (*start, *SKIPPING[self.kind])
        layers = (
            f"model.layers={variants.mean_layers(self.speed)}",
            f"model.keep={self.kind.removeprefix('shallow-')}",
        )
        return (*start, *FULL_DEPTH, *layers)

    def row(self, report: Report, speed: float) -> Row | None:
        """The row of a report that is to be compared at a speed."""
        if self.kind == BASE:
            return report.rows[0]
        if self.speed is not None:
            return report.rows[1] if self.speed == speed else None
        return next((row for row in report.rows if row.speedup_target == speed), None)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="of the trainings")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.05, 0.2, 1.0], metavar="S", help="of the steps")
    parser.add_argument("--speeds", nargs="+", type=float, default=[3.0], metavar="X", help="that all are compared at")
    parser.add_argument("--rate", type=float, metavar="R", help="peak learning rate (default: a third of the recipe's)")
    options = parser.parse_intermixed_args()
    bases = {seed: f"{BASE} seed {seed}" for seed in options.seeds}
    ways: list[Way] = []
    for share in options.shares:
        ways += [Way(kind, share) for kind in (*SKIPPING, BASE)]
        ways += [Way(f"shallow-{keep}", share, speed) for speed in options.speeds for keep in KEPT]
    names = {(way, seed): f"{way.name} seed {seed}" for seed in options.seeds for way in ways}
    made_by = {name: (way, options.output.resolve() / folder_name(bases[seed])) for (way, seed), name in names.items()}

    def evaluations(name: str, run: Path) -> dict[str, list[str]]:
        way, base = made_by.get(name, (None, run))
        if way is None or way.kind == BASE:
            return {name: at_speeds([1.0])}
        if way.speed is not None:
            return {name: ["--reference", str(base)]}
        return {name: at_speeds([1.0, *options.speeds])}

    def table(variants: Variants, reports: Mapping[str, Report]) -> list[str]:
        def scored(name: str, row: Row) -> Scores:
            folder = evaluated_in(options.output, name) / "predictions"
            lines = read_predictions(folder / f"{row.label}.jsonl").values()
            texts = [line.prediction for line in lines]
            meanings = [line.meaning or line.prompt for line in lines]
            known = {"meanings": meanings, "convention": variants.task.convention}
            return score(texts, [line.references for line in lines], METRICS, **known)  # type: ignore[arg-type]

        def rows_of(way: Way, speed: float) -> dict[int, Row]:
            found = {
                seed: way.row(reports[name], speed) for seed in options.seeds if (name := names[way, seed]) in reports
            }
            return {seed: row for seed, row in found.items() if row is not None}

        whole, lines = full_steps(variants), []
        parts = [metric.label for metric in of_parts(next(iter(reports.values())).rows[0])]
        starts = {seed: reports[name].rows[0] for seed, name in bases.items() if name in reports}
        of_starts = {seed: scored(bases[seed], row) for seed, row in starts.items()}
        for speed in options.speeds:
            rows = [[f"0 of {whole}", "(at 1x)", *cells(list(starts.values()), of_starts, {})]] if starts else []
            for share in options.shares:
                found = {way: each for way in ways if way.share == share and (each := rows_of(way, speed))}
                scores = {
                    way: {seed: scored(names[way, seed], row) for seed, row in each.items()}
                    for way, each in found.items()
                }
                even = Way("shallow-even", share, speed)
                for way, each in found.items():
                    label = f"{way.kind}{' (at 1x)' * (way.kind == BASE)}"
                    against = scores.get(even, {}) if way != even else {}
                    rows.append(
                        [f"{max(1, round(share * whole))}", label, *cells(list(each.values()), scores[way], against)]
                    )
            lines += [f"At {speed:g}x:", "", Table([*HEADERS, *parts], rows).to_markdown(), ""]
        return lines

    def drawn(reports: Mapping[str, Report]) -> dict[str, Report]:
        """Those that skip, means over seeds: one checkpoint at several speeds is a line."""
        several = {
            way.name: [reports[name] for seed in options.seeds if (name := names[way, seed]) in reports] for way in ways
        }
        return {
            name: mean(each)
            for name, each in several.items()
            if each and len(each[0].rows) > 1 and each[0].reference is None
        }

    made = {name: lambda _, seed=seed: (*FULL_DEPTH, f"train.seed={seed}") for seed, name in bases.items()}
    for (way, seed), name in names.items():
        made[name] = partial(way.overrides, made_by[name][1], options.rate, seed)
    title = "from a trained model"
    experiment = Experiment(
        "from_trained", title, made, table, drawn, evaluations=evaluations, starts=tuple(bases.values())
    )
    return run_experiment(options, experiment)


def full_steps(variants: Variants) -> int:
    """Steps of the recipe's training."""
    section = variants.recipe().train
    a_step = section.per_device_batch_size * section.gradient_accumulation_steps
    return section.max_steps or round(section.epochs * math.ceil(len(variants.prepared.encoded.rows) / a_step))


def cells(rows: Sequence[Row], scores: Mapping[int, Scores], against: Mapping[int, Scores]) -> list[str]:
    """Means over seeds of speeds, scores and how far these are from another's with the same seeds, with intervals."""
    average = mean_row(rows)
    found = [f"{len(rows)}", f"{average.mean_layers:.2f}", str(average.speed("decode")), str(average.speed("all"))]
    for name in METRICS:
        values = [each.values[name] for each in scores.values()]
        deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        low, high = interval(over_seeds([each.resampled[name] for each in scores.values()]))
        found.append(f"{statistics.fmean(values):.2f}{deviation} [{low:.1f}, {high:.1f}]")
    pairs = [(each, against[seed]) for seed, each in scores.items() if seed in against]
    for name in METRICS:
        if not pairs:
            found.append("–")
            continue
        difference = statistics.fmean(each.values[name] - other.values[name] for each, other in pairs)
        low, high = interval(over_seeds([each.resampled[name] - other.resampled[name] for each, other in pairs]))
        found.append(f"{difference:+.2f} [{low:+.2f}, {high:+.2f}]")
    return found + [metric.show(average.scores[metric.name]) for metric in of_parts(average)]


def of_parts(row: Row) -> list[Metric]:
    """Of parts of the test set, such as WebNLG's seen categories."""
    return [metric for metric in short(row.scores) if PART in metric.name]


if __name__ == "__main__":
    sys.exit(run_command(main))
