"""The results of an evaluation: typed rows, as JSON, Markdown and a table on the terminal."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from eval.bootstrap import RESAMPLES, SIGNIFICANT
from eval.calm import CalmSystem, Threshold
from eval.decoding import Decoded
from eval.scores import Scores
from eval.systems import SkipSystem, SystemKind
from eval.timing import TIMING_HEADS, Timing
from skipdecode import ConfigError
from skipdecode.files import write_whole
from skipdecode.ratio import Ratio

FILE_NAME = "report.json"


@dataclass(frozen=True)
class Row:
    """One system: a checkpoint at one speed, or what it is measured against.

    Attributes:
        label: the row's name, and that of its predictions file: `1x` of what speeds are measured against, `3x` of a
            target, `calm-3x` and `calm-0.9` of confidence exits by target and by threshold, the file's name of a
            schedule of one's own, `full-depth` of a checkpoint beside a reference.
        system: how it decodes.
        checkpoint: what it decodes with.
        num_layers: the layers of that model.
        speedup_target: what the schedule or the threshold was made for; None where it was named.
        schedule: its fields; None for "calm".
        threshold: of "calm".
        mean_layers: layers per generated token, over the tokens that were generated.
        layers_per_step: layers that a batch ran per decode step: where rows differ, those of the deepest.
        scores: metric -> its value, named as in `eval.scores`.
        intervals: metric -> its 95 % confidence interval, for the metrics that have one.
        p_values: metric -> how likely a difference from the 1x row as large as this one is by chance; not in that row.
        timings: its speed at other batch sizes.
        prefill_seconds, decode_seconds: over the whole test set.
        decode_steps: batch steps after prefill.
        tokens: generated tokens after each row's first, without padding.
        tokens_per_second: of these, over decode_seconds.
        wall_clock_speedup: the 1x row's seconds per decode step over this row's: the median over batches.
        wall_clock_quartiles: the quartiles of the same.
        cache_bytes: keys and values held for the largest batch (law 6).
    """

    label: str
    system: SystemKind
    checkpoint: str
    num_layers: int
    speedup_target: float | None
    schedule: dict[str, Any] | None
    mean_layers: float
    layers_per_step: float
    scores: dict[str, float]
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int
    tokens: int
    tokens_per_second: float
    wall_clock_speedup: float
    wall_clock_quartiles: tuple[float, float]
    cache_bytes: int = 0
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    p_values: dict[str, float] = field(default_factory=dict)
    threshold: Threshold | None = None
    timings: list[Timing] = field(default_factory=list)


Column = tuple[str, Callable[[Row], str]]


@dataclass(frozen=True)
class Report:
    """An evaluation: where and how it ran, and a row for each system; the first is what speeds are measured against."""

    checkpoint: str
    task: str
    examples: int
    batch_size: int
    max_new_tokens: int
    dtype: str
    device: str
    date: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    rows: list[Row]
    weights: str = "model"
    prompts_cut: int = 0  # prompts that lost the end of their article or post
    reference: str | None = None  # the checkpoint of the first row, where that is another
    metrics: dict[str, str] = field(default_factory=dict)  # metric -> what was computed, and with which version
    unavailable: dict[str, str] = field(default_factory=dict)  # metric -> why it couldn't be computed

    def save(self, folder: Path) -> None:
        """Write `report.json` and `report.md`, each whole or not at all."""
        write_whole(folder / "report.md", self.to_markdown())
        write_whole(folder / FILE_NAME, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Report":
        """The report of a `report.json`. Raises ConfigError where it can't be read."""
        try:
            return cls.of(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} is no report of an evaluation: {error}") from error

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Report":
        """The report of what stands in a `report.json`. Raises KeyError or TypeError for something else."""
        return cls(**{**values, "rows": [_read_row(row) for row in values["rows"]]})

    def to_markdown(self) -> str:
        """The tables, every score with its interval, and below them what they were measured with."""
        lines = [*markdown_table(*self._table(self.columns())), ""]
        lines += [*markdown_table(*self._table(self._score_columns())), ""]
        if self._timed():
            lines += ["At other batch sizes:", "", *markdown_table(TIMING_HEADS, self._timed()), ""]
        return "\n".join([*lines, *self.notes(), ""])

    def to_tables(self) -> list[Table]:
        """The same for the terminal."""
        tables = [_table(f"{self.task}: {self.checkpoint}", *self._table(self.columns()))]
        if self._timed():
            tables.append(_table("at other batch sizes", TIMING_HEADS, self._timed()))
        return tables

    def columns(self) -> list[Column]:
        """The heads of the table and what stands below them: the scores that fit on a line, or else all of them."""
        metrics = [name for name in SHOWN if name in self._metrics()] or self._metrics()
        scores = [_score_column(name, with_interval=name == metrics[0]) for name in metrics]
        return [*SPEEDS, *scores, *TIMES]

    def notes(self) -> list[str]:
        """How the figures were measured, a line each."""
        weights = f" with {self.weights} weights" if self.weights == "int8" else ""
        cut = f" ({self.prompts_cut} of them cut)" if self.prompts_cut else ""
        return [
            f"{self.examples} prompts{cut}, batch {self.batch_size}, at most {self.max_new_tokens} new tokens, greedy, "
            f"{self.dtype}{weights} on {self.machine['processor']} ({self.machine['threads']} threads), {self.date}.",
            *([f"1x: full depth of the reference {self.reference}."] if self.reference is not None else []),
            *(
                f"{row.label}: {row.threshold.origin()} The row that goes deepest took batches through "
                f"{row.layers_per_step:.2f} layers per step."
                for row in self.rows
                if row.threshold is not None
            ),
            "Speed: seconds per decode step of the 1x row over this row's, median of batches [quartiles], the speeds "
            "taking turns on each batch.",
            f"Scores: [95 % interval over {RESAMPLES:,} resamples of the prompts]; * differs from the 1x row "
            f"(p < {SIGNIFICANT}, paired bootstrap).",
            *(f"{', '.join(names)}: {what}." for what, names in self._described().items()),
            *(f"{LABELS[name]} is not there: {reason}." for name, reason in self.unavailable.items()),
            f"Command: `{self.command}`",
        ]

    def _table(self, columns: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
        return [name for name, _ in columns], [[cell(row) for _, cell in columns] for row in self.rows]

    def _metrics(self) -> list[str]:
        return list(self.rows[0].scores)

    def _score_columns(self) -> list[Column]:
        return [SPEEDS[0], *(_score_column(name, with_interval=True) for name in self._metrics())]

    def _described(self) -> dict[str, list[str]]:
        """What was computed -> the metrics that it is said of."""
        said: dict[str, list[str]] = {}
        for name, what in self.metrics.items():
            said.setdefault(what, []).append(LABELS[name])
        return said

    def _timed(self) -> list[list[str]]:
        """Batch sizes one after another."""
        sizes = range(len(self.rows[0].timings))
        return [[row.label, *row.timings[n].cells()] for n in sizes for row in self.rows]


def headline(scores: Mapping[str, float]) -> str:
    """The metric that stands for the quality of a row: BLEU, or the first one without it."""
    return "bleu" if "bleu" in scores else next(iter(scores))


def _read_row(values: dict[str, Any]) -> Row:
    """A row as JSON gives it, which has no tuples."""
    intervals = {name: (low, high) for name, (low, high) in values["intervals"].items()}
    threshold = Threshold(**values["threshold"]) if values["threshold"] is not None else None
    return Row(
        **{
            **values,
            "wall_clock_quartiles": tuple(values["wall_clock_quartiles"]),
            "intervals": intervals,
            "threshold": threshold,
            "timings": [Timing(**{**timing, "speedup": Ratio(**timing["speedup"])}) for timing in values["timings"]],
        }
    )


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose cells stand on the right."""
    lines = ["| " + " | ".join(heads) + " |", "|" + " ---: |" * len(heads)]
    return [*lines, *("| " + " | ".join(cells) + " |" for cells in rows)]


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.collapse_padding = len(heads) > 12  # more don't fit on 160 columns with a blank on either side
    for head in heads:
        table.add_column(head, justify="right")
    for cells in rows:
        table.add_row(*cells)
    return table


def _schedule(row: Row) -> str:
    if row.threshold is not None:
        return f"λ {row.threshold.value:.4g}"
    assert row.schedule is not None  # as every row has one or the other
    return f"{row.schedule['max_layers']} to {row.schedule['min_layers']}"


LABELS = {
    "bleu": "BLEU",
    "nist": "NIST",
    "meteor": "METEOR",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "cider": "CIDEr",
    "bertscore": "BERTScore",
    "slot_error_rate": "SER",
}
SHOWN = ("bleu", "nist", "rougeL", "bertscore", "slot_error_rate")  # the rest stands in report.md and report.json
SPEEDS: list[Column] = [
    ("system", lambda r: r.label),
    ("layers", lambda r: f"{r.mean_layers:.2f} of {r.num_layers}"),
    ("max to min", _schedule),
    (
        "measured speed",
        lambda r: f"{r.wall_clock_speedup:.2f}x [{r.wall_clock_quartiles[0]:.2f}, {r.wall_clock_quartiles[1]:.2f}]",
    ),
]
TIMES: list[Column] = [
    ("prefill s", lambda r: f"{r.prefill_seconds:.2f}"),
    ("decode s", lambda r: f"{r.decode_seconds:.2f}"),
    ("tokens/s", lambda r: f"{r.tokens_per_second:.0f}"),
    ("cache MB", lambda r: f"{r.cache_bytes / 1e6:.1f}"),
]


def _score_column(name: str, with_interval: bool) -> Column:
    def cell(row: Row) -> str:
        star = "*" if row.p_values.get(name, 1.0) < SIGNIFICANT else ""
        low, high = row.intervals.get(name, (None, None)) if with_interval else (None, None)
        spread = f" [{low:.1f}, {high:.1f}]" if low is not None and high is not None else ""
        return f"{row.scores[name]:.2f}{star}{spread}"

    return LABELS[name], cell


def make_row(decoded: Decoded, baseline: Decoded, scores: Scores, timings: Sequence[Timing] = ()) -> Row:
    """The row of one system, with its wall clock beside that of `baseline`, which took turns with it."""
    system = decoded.system
    speed = decoded.speed_over(baseline)
    return Row(
        label=system.label,
        system=system.kind,
        checkpoint=system.checkpoint.name,
        num_layers=system.checkpoint.num_layers,
        speedup_target=system.speedup_target,
        schedule=system.schedule.to_dict() if isinstance(system, SkipSystem) else None,
        threshold=system.threshold if isinstance(system, CalmSystem) else None,
        mean_layers=decoded.mean_layers,
        layers_per_step=decoded.layers_per_step,
        scores=scores.values,
        intervals=scores.intervals,
        p_values=scores.p_values,
        prefill_seconds=decoded.prefill_seconds,
        decode_seconds=decoded.decode_seconds,
        decode_steps=decoded.steps,
        tokens=decoded.tokens,
        tokens_per_second=decoded.tokens_per_second,
        wall_clock_speedup=speed.median,
        wall_clock_quartiles=(speed.lower, speed.upper),
        cache_bytes=decoded.cache_bytes,
        timings=list(timings),
    )


def write_predictions(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write JSON lines, whole or not at all."""
    write_whole(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
