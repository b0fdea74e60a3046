"""The report of a search: the schedules and the winner, as JSON, Markdown and a table on the terminal."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import rich.table

from eval.results import machine_words
from eval.score.registry import metric_named
from eval.search.paired import Estimate, estimate
from eval.search.space import spread_of
from eval.search.trials import FULL_DEPTH, Batch, statistics_of
from eval.tables import Column, Table
from skipdecode import SkipSchedule
from skipdecode.files import write_atomically

FILE_NAME, WINNER_FILE = "search.json", "winner.json"
CONFIDENCE = 0.95
# A winner may be measured this much slower than the default: enough for timing noise, too little to trade for quality.
MAX_SLOWDOWN = 0.05


@dataclass(frozen=True)
class TrialRow:
    """One schedule.

    Attributes:
        trial: the number of the schedule; 0 is the default.
        schedule: the fields of the schedule.
        predicted_speedup: over full depth; for a budget in layers, the model's layers divided by the mean layers.
        prompts: the number of validation prompts that it was tried on.
        score: the metric on these prompts.
        difference: the score minus that of the default on the same prompts.
        speedup: the measured speedup: seconds per decode step at full depth divided by its own, median over batches.
        speedup_quartiles: the quartiles of `speedup`.
        speed_over_default: seconds per decode step of the default divided by its own, median over batches.
        mean_layers: mean layers per generated token.
    """

    trial: int
    schedule: dict[str, Any]
    predicted_speedup: float
    prompts: int
    score: Estimate
    difference: Estimate
    speedup: float
    speedup_quartiles: tuple[float, float]
    speed_over_default: float
    mean_layers: float

    @property
    def spread(self) -> float:
        """The spread of the budgets: (max - min) / (max + min)."""
        return spread_of(SkipSchedule.from_dict(self.schedule))

    @property
    def decay(self) -> str:
        """The decay with its rate, such as `power 0.5`."""
        rate = self.schedule["decay_rate"]
        return f"{self.schedule['decay']} {rate:g}" if rate is not None else str(self.schedule["decay"])


@dataclass(frozen=True)
class SearchReport:
    """The settings of a search, every schedule that was tried (best first), and the number of the winner.

    `computed` describes the metric; `steps` is the number of tokens over which speedups were predicted; `rungs` holds
    the number of prompts decoded at the end of each rung; `trained_on` is the number of validation prompts that the
    checkpoint was trained on; `asked_for` is the requested number of trials; `planned_speedup` replaces a target that
    can't be reached.
    """

    checkpoint: str
    task: str
    task_options: dict[str, Any]
    metric: str
    computed: str
    target: str
    steps: int | None
    prompts: int
    rungs: list[int]
    trained_on: int
    asked_for: int
    batch_size: int
    max_new_tokens: int
    dtype: str
    weights: str
    calibrated: bool
    seed: int
    date: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    full_depth: Estimate
    winner: int
    trials: list[TrialRow]
    planned_speedup: float | None = None

    @property
    def budget(self) -> str:
        """The target, with the planned speedup where it can't be reached."""
        planned = self.planned_speedup
        return self.target if planned is None else f"{self.target} (planned {planned:.2f}x)"

    @property
    def winning(self) -> TrialRow:
        """The row of the winner."""
        return self.row(self.winner)

    def row(self, trial: int) -> TrialRow:
        """The row of a trial."""
        return next(row for row in self.trials if row.trial == trial)

    def save(self, folder: Path) -> None:
        """Write `winner.json`, `search.md` and, last, `search.json`, each atomically."""
        write_atomically(folder / WINNER_FILE, SkipSchedule.from_dict(self.winning.schedule).to_json() + "\n")
        write_atomically(folder / "search.md", self.to_markdown())
        write_atomically(folder / FILE_NAME, json.dumps(asdict(self), indent=2) + "\n")

    def to_markdown(self) -> str:
        """The verdict, the table, and notes on how it was measured."""
        table = Table.of(self.trials, self._columns()).to_markdown()
        return "\n".join([self.verdict(), "", table, "", *(f"{note}\n" for note in self.notes())])

    def to_table(self) -> rich.table.Table:
        """The table for the terminal."""
        table = Table.of(self.trials, self._columns(), f"{self.task} at {self.budget}: {self.checkpoint}")
        return replace(table, bold=[n for n, row in enumerate(self.trials) if row.trial == self.winner]).to_rich()

    def verdict(self) -> str:
        """Say in a sentence which schedule wins."""
        others, name = len(self.trials) - 1, metric_named(self.metric).label
        if self.winner:
            found = self.winning.difference
            return (
                f"Trial {self.winner} wins: {found.value:+.2f} {name} [{found.low:+.2f}, {found.high:+.2f}] over the "
                f"default schedule on {self.winning.prompts} prompts, significant after correction for {others} "
                f"comparisons, at {self.winning.speed_over_default:.2f} times its measured decode speed."
            )
        best = max((row for row in self.trials if row.trial), key=lambda row: (row.prompts, row.difference.value))
        return (
            f"The default schedule wins: none of {others} others is significantly better. The best of them, trial "
            f"{best.trial}, differs by {best.difference.value:+.2f} {name} [{best.difference.low:+.2f}, "
            f"{best.difference.high:+.2f}] on {best.prompts} prompts."
        )

    def notes(self) -> list[str]:
        """Sentences on how the figures were measured."""
        others = len(self.trials) - 1
        lines = [
            f"{self.prompts} validation prompts{_dropped(self.rungs)}, batch {self.batch_size}, at most "
            f"{self.max_new_tokens} new tokens, greedy, {self.dtype}, {self.weights} weights on "
            f"{machine_words(self.machine)}, seed {self.seed}, {self.date}.",
            f"Full depth: {self.full_depth.value:.2f} {metric_named(self.metric).label} "
            f"[{self.full_depth.low:.2f}, {self.full_depth.high:.2f}].",
            f"{metric_named(self.metric).label}: {self.computed}.",
            "Scores: 95 % bootstrap intervals over prompts; differences are from the default on the same prompts. "
            "Predicted speedup: over "
            + (f"the first {self.steps} generated tokens" if self.steps else "the output lengths of the training data")
            + (", with a profile of this machine measured first." if self.calibrated else ".")
            + " Measured speedup: seconds per decode step at full depth divided by those of the row, median over "
            "batches [quartiles]; all schedules take turns on each batch.",
            "The default is replaced only by a schedule that was tried on all prompts, is better by more than "
            f"{critical_value(others):.2f} standard errors of the difference ({CONFIDENCE:.0%} confidence over all "
            f"{others} comparisons) and is measured at most {MAX_SLOWDOWN:.0%} slower. The score of a winner is biased "
            "upwards by the selection: measure it on the test set.",
        ]
        if self.planned_speedup is not None:
            lines.append(
                f"{self.target} can't be reached on this machine: the default is the fastest schedule that the "
                f"checkpoint was trained for, and the others reach its predicted speedup, {self.planned_speedup:.2f}x."
            )
        if others + 1 < self.asked_for:
            lines.append(
                f"{self.asked_for} trials were requested, but no more schedules of this space reach the target."
            )
        if self.trained_on:
            lines.append(warning(self.trained_on, self.prompts))
        return [*lines, f"Command: `{self.command}`"]

    def _columns(self) -> list[Column[TrialRow]]:
        marks = {0: "default"}
        marks[self.winner] = "default, winner" if self.winner == 0 else "winner"
        columns: list[Column[TrialRow]] = [
            ("trial", lambda r: f"{r.trial} ({marks[r.trial]})" if r.trial in marks else f"{r.trial}"),
            ("max", lambda r: f"{r.schedule['max_layers']}"),
            ("min", lambda r: f"{r.schedule['min_layers']}"),
            ("warm-up", lambda r: f"{r.schedule['warmup_layers']}"),
            ("decay", lambda r: r.decay),
            ("horizon", lambda r: f"{r.schedule['horizon']}"),
        ]
        if len({row.schedule["placement"] for row in self.trials}) > 1:
            columns.append(("placement", lambda r: str(r.schedule["placement"])))
        return [
            *columns,
            ("mean layers", lambda r: f"{r.mean_layers:.2f} of {r.schedule['num_layers']}"),
            ("predicted speedup", lambda r: f"{r.predicted_speedup:.2f}x"),
            (
                "measured speedup",
                lambda r: f"{r.speedup:.2f}x [{r.speedup_quartiles[0]:.2f}, {r.speedup_quartiles[1]:.2f}]",
            ),
            ("prompts", lambda r: f"{r.prompts}"),
            (metric_named(self.metric).label, lambda r: f"{r.score.value:.2f} [{r.score.low:.2f}, {r.score.high:.2f}]"),
            (
                "difference from default",
                lambda r: (
                    f"{r.difference.value:+.2f} [{r.difference.low:+.2f}, {r.difference.high:+.2f}]" if r.trial else "-"
                ),
            ),
        ]


def make_rows(
    schedules: Sequence[SkipSchedule], predicted: Sequence[float], batches: Sequence[Batch], metric: str
) -> list[TrialRow]:
    """A row for each schedule, best first: by the number of prompts, then by the difference from the default."""
    rows = []
    for trial, schedule in enumerate(schedules):
        tried = [batch for batch in batches if any(result.trial == trial for result in batch.results)]
        own, default = statistics_of(tried, trial), statistics_of(tried, 0)
        results = [result for batch in tried for result in batch.results if result.trial == trial]
        tokens = sum(result.tokens for result in results)
        lower, median, upper = _ratio(tried, FULL_DEPTH, trial)
        rows.append(
            TrialRow(
                trial=trial,
                schedule=schedule.to_dict(),
                predicted_speedup=predicted[trial],
                prompts=len(own),
                score=estimate(metric, own),
                difference=estimate(metric, own, baseline=default),
                speedup=median,
                speedup_quartiles=(lower, upper),
                speed_over_default=_ratio(tried, 0, trial)[1],
                mean_layers=sum(result.layers for result in results) / tokens if tokens else float(schedule.budget(0)),
            )
        )
    return sorted(rows, key=lambda row: (-row.prompts, -row.difference.value, row.trial))


def choose_winner(rows: Sequence[TrialRow]) -> int:
    """The number of the best schedule: that of the default, 0, unless another is significantly better.

    It must have been tried on all prompts, be better than the default by more than `critical_value` standard errors,
    and be measured at most MAX_SLOWDOWN slower. Schedules that were dropped count as comparisons too.
    """
    threshold = critical_value(len(rows) - 1)
    prompts = max(row.prompts for row in rows)
    better = [
        row
        for row in rows
        if row.trial
        and row.prompts == prompts
        and row.difference.value > threshold * row.difference.error > 0  # the error of a single prompt is 0
        and row.speed_over_default >= 1 - MAX_SLOWDOWN
    ]
    return max(better, key=lambda row: row.difference.value).trial if better else 0


def critical_value(comparisons: int) -> float:
    """The number of standard errors for CONFIDENCE over all comparisons jointly (Bonferroni)."""
    return statistics.NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / comparisons)


def warning(trained_on: int, prompts: int) -> str:
    """The warning about validation data that a checkpoint was trained on."""
    return (
        f"WARNING: the checkpoint was trained on {trained_on} of these {prompts} validation prompts, so the scores say "
        "little about new prompts. Train a checkpoint with these prompts held out for a valid search."
    )


def _ratio(batches: Sequence[Batch], slower: int, faster: int) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile over batches of the ratio of two trials' seconds per step."""
    ratios = []
    for batch in batches:
        seconds = {result.trial: result.seconds_per_step for result in batch.results}
        numerator, denominator = seconds[slower], seconds[faster]
        if numerator is not None and denominator is not None:
            ratios.append(numerator / denominator)
    if len(ratios) < 2:
        ratios = (ratios or [1.0]) * 2
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return lower, median, upper


def _dropped(rungs: Sequence[int]) -> str:
    if len(rungs) == 1:
        return ""
    return f" (the worse half of the schedules was dropped after {' and after '.join(map(str, rungs[:-1]))})"
