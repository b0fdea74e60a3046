"""The results of an evaluation: typed rows, as JSON, Markdown and a table on the terminal.

It imports nothing that trains or decodes, so that a report is read in a moment.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import rich.table
from pydantic import ConfigDict

from eval.reading import AS_WRITTEN, DAMAGED, as_kind, read_json, what_is_wrong
from eval.score.bootstrap import RESAMPLES, SIGNIFICANT
from eval.score.metric import Metric
from eval.score.registry import METRICS, PART, metric_named, short
from eval.score.scores import not_computable
from eval.score.tokenizers import check_tokenizer
from eval.tables import Column, Table
from skipdecode.errors import ConfigError
from skipdecode.files import write_whole
from skipdecode.schedule.plan import show_planned
from skipdecode.schedule.schedule import Over, SkipSchedule
from skipdecode.timing.interleave import Ratio

FILE_NAME = "report.json"
SystemKind = Literal["full depth", "skip", "calm", "lossless"]
SPEEDS: dict[Over, str] = {"decode": "decoding", "all": "whole"}
SPEEDS_IN_FULL: dict[Over, str] = {"decode": "decoding", "all": "prompt and decoding"}
NOT_MEASURED = "–"


@dataclass(frozen=True)
class Threshold:
    """The confidence that a token must have to leave, and where that comes from.

    Attributes:
        value: λ. At 0 every token leaves after the first layer, above 1 none before the last.
        wanted_layers: layers per token that it was calibrated for; None where the threshold was named.
        found_layers: layers per token that it gave on the validation prompts.
        prompts: how many there were.
    """

    __pydantic_config__: ClassVar[ConfigDict] = AS_WRITTEN

    value: float
    wanted_layers: float | None = None
    found_layers: float | None = None
    prompts: int = 0

    def origin(self) -> str:
        """A sentence for the report."""
        if self.wanted_layers is None:
            return f"λ {self.value:.4g}, as it was named."
        return (
            f"λ {self.value:.4g}, the largest found at which {self.prompts} validation prompts take no more than the "
            f"{self.wanted_layers:.2f} layers per token of the target's schedule: {self.found_layers:.2f}."
        )


@dataclass(frozen=True)
class Timing:
    """The speed of one system at one batch size, every text as long as that of the 1x row.

    Attributes:
        batch_size: prompts decoded together.
        prompts: how many, drawn evenly from the test set in order of length.
        layers_per_step: layers that a batch ran per decode step: where rows differ, those of the deepest.
        speedup: the 1x row's seconds of decoding over this row's, over the batches.
        prefill_seconds, decode_seconds: of all prompts, each once; means where they were timed several times.
        tokens_per_second: of decoding.
        whole_speedup: as `speedup`, of prompt and decoding together; None in a report from before it was measured,
            whose `speedup` is per decode step, on the first prompts of the test set.
        acceptance_rate: of lossless decoding, the share of drafted tokens that stand in the texts.
        tokens_per_verification: of lossless decoding, tokens of all of a batch's sequences for each pass of full depth.
    """

    __pydantic_config__: ClassVar[ConfigDict] = AS_WRITTEN

    batch_size: int
    prompts: int
    layers_per_step: float
    speedup: Ratio
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    whole_speedup: Ratio | None = None
    schedule: dict[str, Any] | None = None  # for this batch size; None of confidence exits, and in older reports
    planned_speedup: float | None = None  # as of a row, for this batch size
    acceptance_rate: float | None = None
    tokens_per_verification: float | None = None


@dataclass(frozen=True)
class Row:
    """One system: a checkpoint at one speed, or what it is measured against.

    Attributes:
        label: the row's name, and that of its predictions file: `1x` of what speeds are measured against, `3x` of a
            target, `calm-3x` and `calm-0.9` of confidence exits by target and by threshold, `lossless-4x` of full depth
            drafted at a target, the file's name of a schedule of one's own, `full-depth` of a checkpoint beside a
            reference.
        system: how it decodes.
        checkpoint: what it decodes with.
        num_layers: the layers of that model.
        speedup_target: what the schedule or the threshold was made for; None where it was named, or only drafts.
        planned_speedup: what was expected in place of a target that can't be reached on that machine: the speed of the
            fastest schedule that the checkpoint was trained for, which decoded. None where the target can be reached.
        schedule: its fields; None for "calm".
        threshold: of "calm".
        mean_layers: layers per generated token, over the tokens that were generated.
        layers_per_step: layers that a batch ran per decode step: where rows differ, those of the deepest.
        scores: metric -> its value, named as in `eval.score.registry`.
        intervals: metric -> its 95 % confidence interval, for the metrics that have one.
        p_values: metric -> how likely a difference from the 1x row as large as this one is by chance; not in that row.
        timings: its speed at each batch size that was asked for.
        prefill_seconds, decode_seconds: over the whole test set, every text as long as the system made it.
        decode_steps: batch steps after prefill.
        tokens: generated tokens after each row's first, without padding.
        tokens_per_second: of these, over decode_seconds.
        wall_clock_speedup: of decoding, at the first of the batch sizes that were asked for: the 1x row's seconds over
            this row's for texts as long, the median over batches.
        wall_clock_quartiles: the quartiles of the same.
        whole_speedup: the same of prompt and decoding together; None in a report from before it was measured, whose
            `wall_clock_speedup` is per decode step, of texts as long as each system made them.
        cache_bytes: keys and values held for the largest batch (law 6).
        same_texts: texts that are those of the 1x row to the letter; None in a report from before they were counted.
        agreement: for each place in a text, tokens that full depth would have chosen behind what stands before them,
            and how many tokens there are; empty where that wasn't asked for.
        lossless_speedup: of decoding that drafts as this row decodes, one text at a time, some of them
            (`eval.lossless`); None without agreement, and where drafts can't be.
        processes: how many decoded the test set. Those that share its prompts do so at the same time: its seconds are
            summed over them, and `tokens_per_second` is that of one. `timings` are of one process while the others
            wait, and of all where they hold one model together.
        bound_by_bytes: bytes of weights and cache that decoding must read in the 1x row, over those of this row: how
            much faster it could be where a step waits for memory alone; None in a report from before it was recorded.
    """

    __pydantic_config__: ClassVar[ConfigDict] = AS_WRITTEN

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
    bound_by_bytes: float | None = None
    threshold: Threshold | None = None
    timings: list[Timing] = field(default_factory=list)
    whole_speedup: Ratio | None = None
    same_texts: int | None = None
    agreement: list[tuple[int, int]] = field(default_factory=list)
    lossless_speedup: float | None = None
    processes: int = 1
    planned_speedup: float | None = None

    @property
    def agreeing(self) -> float | None:
        """The share of all tokens that full depth would have chosen."""
        return sum(n for n, _ in self.agreement) / sum(of for _, of in self.agreement) if self.agreement else None

    def speed(self, over: Over) -> Ratio:
        """Measured; of the whole only where that was."""
        if over == "decode":
            return Ratio(self.wall_clock_speedup, *self.wall_clock_quartiles)
        assert self.whole_speedup is not None  # as in every report whose targets are of the whole
        return self.whole_speedup


@dataclass(frozen=True)
class Report:
    """An evaluation: where and how it ran, and a row for each system; the first is what speeds are measured against."""

    __pydantic_config__: ClassVar[ConfigDict] = AS_WRITTEN

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
    never_ended: int = 0  # texts of the 1x row that are as long as they may be
    over: Over = "decode"  # what targets are of
    clock: str = ""  # what schedules were solved for
    reference: str | None = None  # the checkpoint of the first row, where that is another
    split: Literal["layers", "tensors"] | None = None  # how one model lay on several devices; None: on one
    metrics: dict[str, str] = field(default_factory=dict)  # metric -> what was computed, and with which version
    unavailable: dict[str, str] = field(default_factory=dict)  # metric -> why it couldn't be computed
    tokenizer: str | None = None  # whose words BLEU, NIST, ROUGE and CIDEr count; None: each its own

    @property
    def timed_batch_size(self) -> int:
        """The batch size of the rows' speeds: the first of those that were asked for."""
        timed_whole = self.rows[0].whole_speedup is not None
        return self.rows[0].timings[0].batch_size if timed_whole else self.batch_size

    def save(self, folder: Path) -> None:
        """Write `report.json` and `report.md`, each whole or not at all."""
        write_whole(folder / "report.md", self.to_markdown())
        write_whole(folder / FILE_NAME, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Report":
        """The report of a `report.json`. Raises ConfigError where it can't be read, or shown."""
        try:
            report = cls.of(read_json(path))
            report.check()
        except DAMAGED as error:
            raise ConfigError(f"{path} is no report of an evaluation: {what_is_wrong(error)}") from error
        return report

    @classmethod
    def of(cls, values: Any) -> "Report":
        """The report of what stands in a `report.json`. Raises ValueError for something else."""
        report = as_kind(cls, values)
        if not report.rows:
            raise ValueError("it has no rows")
        whole = all(row.whole_speedup is not None for row in report.rows)
        if report.over == "all" and not whole:
            raise ValueError(f"its targets are over {report.over!r}, and no such speed was measured")
        return report

    def check(self) -> None:
        """Refuse what the dataclasses don't: values that are no numbers, rows that can't be compared.

        Raises LookupError, TypeError, AttributeError or ValueError, of which ConfigError is one.
        """
        json.dumps(asdict(self), ensure_ascii=False, allow_nan=False).encode()
        check_tokenizer(self.tokenizer)
        scored = set(self.rows[0].scores)
        for row in self.rows:
            if unknown := {name for name in row.scores if name.partition(PART)[0] not in METRICS}:
                raise ValueError(f"the row {row.label} has scores by {min(unknown)!r}, which is no metric")
            if not scored or set(row.scores) != scored:
                raise ValueError("its rows are not all scored by the same metrics")
            if not row.wall_clock_speedup > 0 or not row.layers_per_step > 0 or not (row.speedup_target or 1) > 0:
                raise ValueError(f"the row {row.label} has a speed, a target or layers that aren't above 0")
            # Drafted by as many layers as pay, a lossless row has neither.
            if row.system != "lossless" and (row.schedule is None) == (row.threshold is None):
                raise ValueError(f"the row {row.label} needs either a schedule or a threshold")
        self.to_markdown()  # which formats the other figures

    def to_markdown(self) -> str:
        """The tables, every score with its interval, and below them what they were measured with."""
        intervals = [SYSTEM, *(score_column(metric) for metric in self._metrics())]
        parts = [Table.of(self.rows, self.columns()).to_markdown(), Table.of(self.rows, intervals).to_markdown()]
        if self._timed():
            parts += ["By batch size:", Table.of(self._timed(), self._timing_columns()).to_markdown()]
        return "\n\n".join([*parts, "\n".join([*self.notes(), ""])])

    def to_tables(self) -> list[rich.table.Table]:
        """The same for the terminal."""
        tables = [Table.of(self.rows, self.columns(), f"{self.task}: {self.checkpoint}").to_rich()]
        if self._timed():
            tables.append(Table.of(self._timed(), self._timing_columns(), "by batch size").to_rich())
        return tables

    def columns(self) -> list[Column[Row]]:
        """The columns of the table: speeds beside what was asked, and the scores that fit on a line, or else all."""
        metrics = short(self.rows[0].scores)
        scores = [score_column(metric, with_interval=metric is metrics[0]) for metric in metrics]
        agreement: list[Column[Row]] = [("agrees", lambda r: show_share(r.agreeing))]
        shown = agreement if any(row.agreement for row in self.rows) else []
        return [*_speed_columns(self.over), *scores, *shown, ("cache MB", lambda r: f"{r.cache_bytes / 1e6:.1f}")]

    def notes(self) -> list[str]:
        """Say how the figures were measured, a line each."""
        weights = f" with {self.weights} weights" if self.weights not in ("model", "packed") else ""
        cut = f" ({self.prompts_cut} of them cut)" if self.prompts_cut else ""
        return [
            f"{self.examples} prompts{cut}, batch {self.batch_size}, at most {self.max_new_tokens} new tokens, greedy, "
            f"{self.dtype}{weights} on {self.machine['processor']} ({self.machine['threads']} threads), {self.date}.",
            *self._process_notes(),
            *([f"1x: full depth of the reference {self.reference}."] if self.reference is not None else []),
            *(
                f"{row.label}: {row.threshold.origin()} The row that goes deepest took batches through "
                f"{row.layers_per_step:.2f} layers per step."
                for row in self.rows
                if row.threshold is not None
            ),
            self.speed_note(),
            *self.planned_notes(),
            *self._length_notes(),
            *self._agreement_notes(),
            f"Scores: [95 % interval over {RESAMPLES:,} resamples of the prompts]; * differs from the 1x row "
            f"(p < {SIGNIFICANT}, paired bootstrap).",
            *(f"{', '.join(names)}: {what}." for what, names in self._described().items()),
            *([f"Scores of {' and '.join(parts)} are of those prompts alone."] if (parts := self._parts()) else []),
            *not_computable(self.unavailable),
            f"Command: `{self.command}`",
        ]

    def speed_note(self) -> str:
        """Say how the speeds were measured."""
        turns = "median of batches [quartiles], the systems taking turns on each batch"
        if self.rows[0].whole_speedup is None:
            return f"Speed: seconds per decode step of the 1x row over this row's, {turns}."
        return (
            f"Speed: seconds of the 1x row over this row's at batch {self.timed_batch_size}, of decoding and of the "
            f"whole, prompt and decoding: {turns}. Prompts ({self.rows[0].timings[0].prompts}) are drawn evenly over "
            f"all lengths, and every text is as long as that of the 1x row. Targets are of "
            f"{SPEEDS_IN_FULL[self.over]}, solved for each batch size by {self.clock or 'bytes and operations'}."
        )

    def planned_notes(self) -> list[str]:
        """Say which rows have a target that couldn't be reached."""
        missed: dict[str, list[str]] = {}
        for row in self.rows:
            by_size = {timing.batch_size: timing.planned_speedup for timing in row.timings}
            by_size[self.batch_size] = row.planned_speedup
            for size, planned in sorted(by_size.items()):
                if planned is not None:
                    missed.setdefault(row.label, []).append(f"{planned:.2f}x at batch {size}")
        if not missed:
            return []
        rows = "; ".join(f"{label}: planned {', '.join(planned)}" for label, planned in missed.items())
        return [
            f"Targets that can't be reached by {self.clock or 'bytes and operations'}, in place of which the fastest "
            f"schedule that the checkpoint was trained for decoded: {rows}."
        ]

    def _length_notes(self) -> list[str]:
        """Say where the texts that speeds are of are no texts of the task: a model that doesn't know 1x ends few."""
        if 2 * self.never_ended <= self.examples:
            return []
        return [
            f"{self.never_ended} of {self.examples} texts of the 1x row, whose lengths all rows are timed at, never "
            f"ended: these are speeds of texts of {self.max_new_tokens} tokens, more than those of texts that end."
        ]

    def _process_notes(self) -> list[str]:
        """Say how many processes decoded, where they were several."""
        count = self.rows[0].processes
        if count == 1:
            return []
        if self.split == "tensors":
            return [f"{count} processes held one model together; the clock is theirs."]
        return [f"{count} processes shared the prompts; speeds are those of one alone, and seconds are sums over them."]

    def _agreement_notes(self) -> list[str]:
        """Say what the share of agreeing tokens is, and whether lossless texts are what they should be."""
        notes = [
            f"{row.label}: {row.same_texts} of {self.examples} texts are those of the 1x row to the letter."
            for row in self.rows
            if row.system == "lossless" and self.reference is None  # whose 1x row is another model's
        ]
        if any(row.agreement for row in self.rows):
            notes.append(
                "Agrees: tokens that the checkpoint's full depth would have chosen behind what stands before them."
            )
        if drafted := [f"{row.label} {row.lossless_speedup:.2f}x" for row in self.rows if row.lossless_speedup]:
            notes.append(
                f"Lossless decoding that drafts as a row, one text at a time, of some texts: {', '.join(drafted)}."
            )
        return notes

    def _metrics(self) -> list[Metric]:
        return [metric_named(name) for name in self.rows[0].scores]

    def _described(self) -> dict[str, list[str]]:
        """A description of what was computed -> the metrics that it is said of; of parts it is what the whole's is."""
        said: dict[str, list[str]] = {}
        for name, what in self.metrics.items():
            if PART not in name:
                said.setdefault(what, []).append(metric_named(name).label)
        return said

    def _parts(self) -> list[str]:
        """The parts of the test set that have scores of their own."""
        return list(dict.fromkeys(name.partition(PART)[2] for name in self.metrics if PART in name))

    def _timed(self) -> list[tuple[Row, Timing]]:
        """Batch sizes one after another."""
        sizes = range(len(self.rows[0].timings))
        return [(row, row.timings[n]) for n in sizes for row in self.rows]

    def _timing_columns(self) -> list[Column[tuple[Row, Timing]]]:
        drafted = any(timing.tokens_per_verification for _, timing in self._timed())
        return [*timing_columns(self.over), *(DRAFT_COLUMNS if drafted else [])]


def speed_shown(reports: Iterable[Report]) -> Over:
    """The speed that a picture of several reports shows: what all were asked for, else decoding, which all have."""
    return "all" if all(report.over == "all" for report in reports) else "decode"


def speed_headers(asked: Over) -> list[str]:
    """The headers of both speeds, decoding first; marked is the one that targets ask for."""
    return [f"{name} (asked)" if over == asked else name for over, name in SPEEDS.items()]


def show_target(speedup: float | None, planned: float | None = None) -> str:
    """A target such as `3x`, with what was planned where it can't be reached; a dash where a row was made for none."""
    return NOT_MEASURED if speedup is None else show_planned(speedup, planned)


def show_share(share: float | None) -> str:
    """A share in percent; a dash where it wasn't measured."""
    return NOT_MEASURED if share is None else f"{100 * share:.1f} %"


def show_number(number: float | None) -> str:
    """A number; a dash where it wasn't measured."""
    return NOT_MEASURED if number is None else f"{number:.2f}"


def show_speed(ratio: Ratio | None) -> str:
    """A measured speed with its quartiles; a dash where it wasn't measured."""
    return NOT_MEASURED if ratio is None else str(ratio)


def _layers_of(row: Row, schedule: dict[str, Any] | None) -> str:
    """A row's schedule, or one of its own of another batch size, in a table; lossless prompts run every layer."""
    if row.threshold is not None:
        return f"λ {row.threshold.value:.4g}"
    if schedule is None:
        return "-"
    found = SkipSchedule.from_dict(schedule)
    layers = f"{found.max_layers} to {found.min_layers}"
    whole = row.system == "lossless" or (found.prompt == "full" and not found.stopped_layers)
    return layers if whole else f"{layers}, prompt {found.prompt_depth}"


SYSTEM: Column[Row] = ("system", lambda r: r.label)


def _speed_columns(asked: Over) -> list[Column[Row]]:
    decoding, whole = speed_headers(asked)
    return [
        SYSTEM,
        ("layers", lambda r: f"{r.mean_layers:.2f} of {r.num_layers}"),
        ("max to min", lambda r: _layers_of(r, r.schedule)),
        ("asked", lambda r: show_target(r.speedup_target, r.planned_speedup)),
        (decoding, lambda r: str(r.speed("decode"))),
        (whole, lambda r: show_speed(r.whole_speedup)),
    ]


def timing_columns(asked: Over) -> list[Column[tuple[Row, Timing]]]:
    """The columns of a table of timings with their rows."""
    decoding, whole = speed_headers(asked)
    return [
        ("system", lambda pair: pair[0].label),
        ("batch", lambda pair: str(pair[1].batch_size)),
        ("prompts", lambda pair: str(pair[1].prompts)),
        ("layers per step", lambda pair: f"{pair[1].layers_per_step:.2f}"),
        ("max to min", lambda pair: _layers_of(pair[0], pair[1].schedule)),
        ("asked", lambda pair: show_target(pair[0].speedup_target, pair[1].planned_speedup)),
        (decoding, lambda pair: str(pair[1].speedup)),
        (whole, lambda pair: show_speed(pair[1].whole_speedup)),
        ("prefill s", lambda pair: f"{pair[1].prefill_seconds:.2f}"),
        ("decode s", lambda pair: f"{pair[1].decode_seconds:.2f}"),
        ("tokens/s", lambda pair: f"{pair[1].tokens_per_second:.0f}"),
    ]


# Of a table of timings, where some were drafted.
DRAFT_COLUMNS: list[Column[tuple[Row, Timing]]] = [
    ("accepted", lambda pair: show_share(pair[1].acceptance_rate)),
    ("tokens per verification", lambda pair: show_number(pair[1].tokens_per_verification)),
]


def score_column(metric: Metric, *, with_interval: bool = True) -> Column[Row]:
    """A metric's scores; a star marks what differs from the 1x row."""

    def cell(row: Row) -> str:
        star = "*" if row.p_values.get(metric.name, 1.0) < SIGNIFICANT else ""
        low, high = row.intervals.get(metric.name, (None, None)) if with_interval else (None, None)
        spread = f" [{low:.1f}, {high:.1f}]" if low is not None and high is not None else ""
        return f"{row.scores[metric.name]:.2f}{star}{spread}"

    return metric.label, cell
