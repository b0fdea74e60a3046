"""The results of an evaluation: typed rows, as JSON, Markdown and a table on the terminal."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from eval.bootstrap import RESAMPLES, SIGNIFICANT
from eval.decoding import Decoded
from eval.files import write_whole
from eval.scores import Scores
from skipdecode import ConfigError

FILE_NAME = "report.json"


@dataclass(frozen=True)
class Row:
    """One speed.

    Attributes:
        speedup_target: what the schedule was solved for.
        schedule: its fields.
        mean_layers: layers per generated token, over the tokens that were generated.
        scores: metric -> its value, named as in `eval.scores`.
        intervals: metric -> its 95 % confidence interval, for the metrics that have one.
        p_values: metric -> how likely a difference from the 1x row as large as this one is by chance; not in that row.
        prefill_seconds, decode_seconds: over the whole test set.
        decode_steps: batch steps after prefill.
        tokens: generated tokens after each row's first, without padding.
        tokens_per_second: of these, over decode_seconds.
        wall_clock_speedup: the 1x row's seconds per decode step over this row's: the median over batches.
        wall_clock_quartiles: the quartiles of the same.
        cache_bytes: keys and values held for the largest batch (law 6).
    """

    speedup_target: float
    schedule: dict[str, Any]
    mean_layers: float
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


Column = tuple[str, Callable[[Row], str]]


@dataclass(frozen=True)
class Report:
    """An evaluation: where and how it ran, and a row for each speed."""

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
            values = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**values, "rows": [_read_row(row) for row in values["rows"]]})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no report of an evaluation: {error}") from error

    def to_markdown(self) -> str:
        """The table, every score with its interval, and below them what they were measured with."""
        tables = [_markdown(*self._table(columns)) for columns in (self.columns(), self._score_columns())]
        return "\n".join([*tables, *self.notes(), ""])

    def to_table(self) -> Table:
        """The same for the terminal."""
        heads, rows = self._table(self.columns())
        table = Table(title=f"{self.task}: {self.checkpoint}", title_justify="left")
        table.collapse_padding = len(heads) > 12  # more don't fit on 160 columns with a blank on either side
        for head in heads:
            table.add_column(head, justify="right")
        for cells in rows:
            table.add_row(*cells)
        return table

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


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + " ---: |" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows), ""])


def headline(scores: Mapping[str, float]) -> str:
    """The metric that stands for the quality of a row: BLEU, or the first one without it."""
    return "bleu" if "bleu" in scores else next(iter(scores))


def _read_row(values: dict[str, Any]) -> Row:
    """A row as JSON gives it, which has no tuples."""
    intervals = {name: (low, high) for name, (low, high) in values["intervals"].items()}
    return Row(**{**values, "wall_clock_quartiles": tuple(values["wall_clock_quartiles"]), "intervals": intervals})


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
    ("target", lambda r: f"{r.speedup_target:g}x"),
    ("layers", lambda r: f"{r.mean_layers:.2f} of {r.schedule['num_layers']}"),
    ("max to min", lambda r: f"{r.schedule['max_layers']} to {r.schedule['min_layers']}"),
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


def make_row(speedup: float, decoded: Decoded, full_depth: Decoded, scores: Scores) -> Row:
    """The row of one speed, with its wall clock beside that of `full_depth`, which took turns with it."""
    ratios = [
        full / step
        for full, step in zip(full_depth.seconds_per_step, decoded.seconds_per_step, strict=True)
        if full is not None and step is not None
    ]
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (ratios or [1.0]) * 3
    seconds = sum(decoded.decode_seconds)
    return Row(
        speedup_target=speedup,
        schedule=decoded.schedule.to_dict(),
        mean_layers=decoded.mean_layers,
        scores=scores.values,
        intervals=scores.intervals,
        p_values=scores.p_values,
        prefill_seconds=sum(decoded.prefill_seconds),
        decode_seconds=seconds,
        decode_steps=sum(decoded.decode_steps),
        tokens=decoded.tokens,
        tokens_per_second=decoded.tokens / seconds if seconds else 0.0,
        wall_clock_speedup=quartiles[1],
        wall_clock_quartiles=(quartiles[0], quartiles[2]),
        cache_bytes=decoded.cache_bytes,
    )


def write_predictions(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write JSON lines, whole or not at all."""
    write_whole(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
