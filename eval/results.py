"""The results of an evaluation: typed rows, as JSON, Markdown and a table on the terminal.

The module imports nothing that trains or decodes, so a report loads quickly.
"""

import json
from collections.abc import Iterable, Mapping
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
from skipdecode.files import write_atomically
from skipdecode.schedule.plan import show_planned
from skipdecode.schedule.schedule import Over, SkipSchedule
from skipdecode.timing.interleave import Ratio

FILE_NAME = "report.json"
SystemKind = Literal["full depth", "skip", "calm", "lossless"]
SPEED_NAMES: dict[Over, str] = {"decode": "decode", "all": "end-to-end"}
SPEED_HEADERS: dict[Over, str] = {over: f"speedup ({name})" for over, name in SPEED_NAMES.items()}
NOT_MEASURED = "–"
DEFAULT_CLOCK = "the analytical cost model"  # where a report of an older version doesn't name one


@dataclass(frozen=True)
class Threshold:
    """The confidence at which a token exits early, and how the value was chosen.

    Attributes:
        value: λ. At 0 every token exits after the first layer; above 1 none exits before the last.
        wanted_layers: mean layers per token that it was calibrated for; None where the user gave the threshold.
        found_layers: mean layers per token that it gave on the validation prompts.
        prompts: the number of validation prompts.
    """

    __pydantic_config__: ClassVar[ConfigDict] = AS_WRITTEN

    value: float
    wanted_layers: float | None = None
    found_layers: float | None = None
    prompts: int = 0

    def origin(self) -> str:
        """Say in one sentence how the value was chosen."""
        if self.wanted_layers is None:
            return f"λ {self.value:.4g}, given by the user."
        return (
            f"λ {self.value:.4g}, the largest threshold found at which {self.prompts} validation prompts run at most "
            f"the {self.wanted_layers:.2f} layers per token of the target's schedule: {self.found_layers:.2f}."
        )


@dataclass(frozen=True)
class Timing:
    """The speed of one system at one batch size; every sequence has the length that the 1x row generated.

    Attributes:
        batch_size: prompts decoded together.
        prompts: the number of prompts timed, drawn evenly from the test set in order of length.
        layers_per_step: layers that a batch ran per decode step; where sequences differ, those of the deepest.
        speedup: the decode seconds of the 1x row divided by those of this row, over the batches.
        prefill_seconds, decode_seconds: sums over all prompts; means over the repetitions where there are several.
        tokens_per_second: decode throughput.
        whole_speedup: the end-to-end (prefill + decode) speedup; None in reports of older versions, whose `speedup` is
            per decode step and measured on the first prompts of the test set.
        acceptance_rate: the fraction of drafted tokens that were accepted, of lossless decoding.
        tokens_per_verification: tokens of all sequences of a batch per full-depth pass, of lossless decoding.
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
    schedule: dict[str, Any] | None = None  # for this batch size; None for confidence exits, and in older reports
    planned_speedup: float | None = None  # as in Row, for this batch size
    acceptance_rate: float | None = None
    tokens_per_verification: float | None = None


@dataclass(frozen=True)
class Row:
    """One system: a checkpoint at one speed, or the baseline that speeds are measured against.

    Attributes:
        label: the name of the row and of its predictions file: `1x` for the baseline of all speeds, `3x` for a
            target, `calm-3x` and `calm-0.9` for confidence exits by target and by threshold, `lossless-4x` for
            self-speculative decoding drafted at a target, the file's name for a user's schedule, `full-depth` for the
            checkpoint itself beside a reference.
        system: the decoding method.
        checkpoint: the folder or name of the model.
        num_layers: the number of decoder layers of that model.
        speedup_target: the speedup that the schedule or threshold was solved for; None where the user gave the
            schedule or threshold, and for self-speculative decoding.
        planned_speedup: the predicted speedup of the fastest schedule that the checkpoint was trained for, which
            decodes where the target can't be reached. None where the target can be reached.
        schedule: the fields of the schedule; None for "calm".
        threshold: the threshold of "calm"; None otherwise.
        mean_layers: mean number of layers per generated token.
        layers_per_step: layers that a batch ran per decode step; where sequences differ, those of the deepest.
        scores: metric -> its value; metrics are named as in `eval.score.registry`.
        intervals: metric -> its 95 % confidence interval, for the metrics that have one.
        p_values: metric -> the probability that a difference this large from the 1x row arises by chance; empty in
            the 1x row.
        timings: its speed at each requested batch size.
        prefill_seconds, decode_seconds: over the whole test set, for sequences of the lengths that the system made.
        decode_steps: batch steps after prefill.
        tokens: generated tokens after the first of each sequence, without padding.
        tokens_per_second: `tokens` divided by `decode_seconds`.
        wall_clock_speedup: the decode speedup at the first requested batch size: seconds of the 1x row divided by those
            of this row for sequences of equal length, the median over batches.
        wall_clock_quartiles: the quartiles of `wall_clock_speedup`.
        whole_speedup: the end-to-end (prefill + decode) speedup; None in reports of older versions, whose
            `wall_clock_speedup` is per decode step, for sequences of the lengths that each system generated.
        cache_bytes: keys and values allocated for the largest batch.
        same_texts: how many output texts are identical to those of the 1x row; None in reports of older versions.
        agreement: for each position of the output, how many tokens are full depth's choice given the tokens before
            them, and how many tokens there are; empty where agreement wasn't requested.
        lossless_speedup: the speedup of self-speculative decoding with this row's schedule as the draft, at batch 1, on
            a part of the test set (`eval.lossless`); None without agreement, and where the model can't draft.
        processes: the number of processes that decoded the test set. Where they share its prompts, seconds are sums
            over processes and `tokens_per_second` is that of one; `timings` come from one process while the others
            wait, or from all of them where they hold one model together.
        bound_by_bytes: bytes of weights and cache that decoding must read in the 1x row, divided by those of this row:
            the speedup of a decoder bound by memory bandwidth alone; None in reports of older versions.
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
        """The fraction of tokens that are full depth's choice given the tokens before them."""
        return sum(n for n, _ in self.agreement) / sum(of for _, of in self.agreement) if self.agreement else None

    def speed(self, over: Over) -> Ratio:
        """The measured speedup. The end-to-end one is missing in reports of older versions."""
        if over == "decode":
            return Ratio(self.wall_clock_speedup, *self.wall_clock_quartiles)
        assert self.whole_speedup is not None  # Report.of refuses end-to-end targets without it
        return self.whole_speedup


def machine_words(machine: Mapping[str, Any]) -> str:
    """A described machine in notes and pictures, such as "AMD EPYC (2 threads)"."""
    threads = machine["threads"]
    return f"{machine['processor']} ({threads} thread{'' if threads == 1 else 's'})"


@dataclass(frozen=True)
class Report:
    """An evaluation: where and how it ran, and a row for each system; the first row is the baseline of all speeds."""

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
    data_split: Literal["train", "validation", "test"] = "test"  # the split whose prompts were decoded
    prompts_cut: int = 0  # prompts whose article or post was truncated
    never_ended: int = 0  # outputs of the 1x row that reach max_new_tokens
    over: Over = "decode"  # the speedup that targets apply to
    clock: str = ""  # the cost model or profile that schedules were solved with
    reference: str | None = None  # the checkpoint of the first row, where it is another one
    split: Literal["layers", "tensors"] | None = None  # how one model was split over several devices; None: one device
    metrics: dict[str, str] = field(default_factory=dict)  # metric -> what was computed, and with which version
    unavailable: dict[str, str] = field(default_factory=dict)  # metric -> why it couldn't be computed
    tokenizer: str | None = None  # of the words that BLEU, NIST, ROUGE and CIDEr count; None: each metric's own

    @property
    def timed_batch_size(self) -> int:
        """The batch size of the rows' speeds: the first one requested."""
        end_to_end = self.rows[0].whole_speedup is not None
        return self.rows[0].timings[0].batch_size if end_to_end else self.batch_size

    def save(self, folder: Path) -> None:
        """Write `report.json` and `report.md` atomically."""
        write_atomically(folder / "report.md", self.to_markdown())
        write_atomically(folder / FILE_NAME, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Report":
        """Read a `report.json`. Raises ConfigError where it can't be read or formatted."""
        try:
            report = cls.of(read_json(path))
            report.check()
        except DAMAGED as error:
            raise ConfigError(f"{path} is not a report of an evaluation: {what_is_wrong(error)}") from error
        return report

    @classmethod
    def of(cls, values: Any) -> "Report":
        """The report of the values in a `report.json`. Raises ValueError for other values."""
        report = as_kind(cls, values)
        if not report.rows:
            raise ValueError("it has no rows")
        if report.over == "all" and any(row.whole_speedup is None for row in report.rows):
            raise ValueError(f"its targets are over {report.over!r}, but it has no end-to-end speedups")
        return report

    def check(self) -> None:
        """Refuse values that the dataclasses accept: infinite numbers, rows that can't be compared.

        Raises LookupError, TypeError, AttributeError or ValueError, of which ConfigError is one.
        """
        json.dumps(asdict(self), ensure_ascii=False, allow_nan=False).encode()
        check_tokenizer(self.tokenizer)
        scored = set(self.rows[0].scores)
        for row in self.rows:
            if unknown := {name for name in row.scores if name.partition(PART)[0] not in METRICS}:
                raise ValueError(f"the row {row.label} has a score named {min(unknown)!r}, which is not a metric")
            if not scored or set(row.scores) != scored:
                raise ValueError("its rows don't all have the same metrics")
            if not row.wall_clock_speedup > 0 or not row.layers_per_step > 0 or not (row.speedup_target or 1) > 0:
                raise ValueError(f"the row {row.label} has a speed, a target or a number of layers that isn't above 0")
            # A lossless row whose draft depth is chosen automatically has neither.
            if row.system != "lossless" and (row.schedule is None) == (row.threshold is None):
                raise ValueError(f"the row {row.label} needs either a schedule or a threshold")
        self.to_markdown()  # fails on figures that can't be formatted

    def to_markdown(self) -> str:
        """The tables, with the interval of every score, and notes on how they were measured."""
        intervals = [SYSTEM, *(score_column(metric) for metric in self._metrics())]
        parts = [Table.of(self.rows, self.columns()).to_markdown(), Table.of(self.rows, intervals).to_markdown()]
        if self._timed():
            parts += ["By batch size:", Table.of(self._timed(), self._timing_columns()).to_markdown()]
        return "\n\n".join([*parts, "\n".join([*self.notes(), ""])])

    def to_tables(self) -> list[rich.table.Table]:
        """The tables for the terminal."""
        tables = [Table.of(self.rows, self.columns(), f"{self.task}: {self.checkpoint}").to_rich()]
        if self._timed():
            tables.append(Table.of(self._timed(), self._timing_columns(), "by batch size").to_rich())
        return tables

    def columns(self) -> list[Column[Row]]:
        """The columns of the main table: targets, measured speedups, and the scores that fit on a line (else all)."""
        metrics = short(self.rows[0].scores)
        scores = [score_column(metric, with_interval=metric is metrics[0]) for metric in metrics]
        agreement: list[Column[Row]] = [("agreement", lambda r: show_share(r.agreeing))]
        shown = agreement if any(row.agreement for row in self.rows) else []
        return [*SPEED_COLUMNS, *scores, *shown, ("KV cache (MB)", lambda r: f"{r.cache_bytes / 1e6:.1f}")]

    def notes(self) -> list[str]:
        """Sentences on how the figures were measured."""
        weights = f" with {self.weights} weights" if self.weights not in ("model", "packed") else ""
        where = "" if self.data_split == "test" else f" of the {self.data_split} split"
        cut = f" ({self.prompts_cut} of them truncated)" if self.prompts_cut else ""
        return [
            f"{self.examples} prompts{where}{cut}, batch {self.batch_size}, at most {self.max_new_tokens} new tokens, "
            f"greedy, {self.dtype}{weights} on {machine_words(self.machine)}, {self.date}.",
            *self._process_notes(),
            *([f"1x: the reference {self.reference} at full depth."] if self.reference is not None else []),
            *(
                f"{row.label}: {row.threshold.origin()} A batch runs as deep as its deepest sequence: "
                f"{row.layers_per_step:.2f} layers per step."
                for row in self.rows
                if row.threshold is not None
            ),
            self.speed_note(),
            *self.planned_notes(),
            *self._length_notes(),
            *self._agreement_notes(),
            f"Scores: [95 % interval over {RESAMPLES:,} bootstrap resamples of the prompts]; * differs from the 1x row "
            f"(p < {SIGNIFICANT}, paired bootstrap).",
            *(f"{', '.join(names)}: {what}." for what, names in self._described().items()),
            *([f"Scores named {' and '.join(parts)} cover only those prompts."] if (parts := self._parts()) else []),
            *not_computable(self.unavailable),
            f"Command: `{self.command}`",
        ]

    def speed_note(self) -> str:
        """A sentence on how the speedups were measured."""
        turns = "The median over batches is given [quartiles]; the systems take turns on each batch."
        if self.rows[0].whole_speedup is None:
            return f"Speedup: seconds per decode step of the 1x row divided by those of this row. {turns}"
        return (
            f"Speedup: seconds of the 1x row divided by those of this row at batch {self.timed_batch_size}, for decode "
            f"and end-to-end (prefill + decode). {turns} The {self.rows[0].timings[0].prompts} timed prompts are drawn "
            f"evenly over all lengths, and every sequence has the length that the 1x row generated. Targets apply to "
            f"the {SPEED_NAMES[self.over]} speedup, solved for each batch size by {self.clock or DEFAULT_CLOCK}."
        )

    def planned_notes(self) -> list[str]:
        """A sentence that names the rows whose target can't be reached."""
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
            f"Some targets can't be reached by {self.clock or DEFAULT_CLOCK}; the fastest schedule that the checkpoint "
            f"was trained for was used instead: {rows}."
        ]

    def _length_notes(self) -> list[str]:
        """Warn where most outputs of the 1x row never end, as those of a model that wasn't trained at full depth."""
        if 2 * self.never_ended <= self.examples:
            return []
        return [
            f"{self.never_ended} of {self.examples} outputs of the 1x row, whose lengths are used to time all rows, "
            f"never end: speedups are those of {self.max_new_tokens} tokens, higher than for outputs that end."
        ]

    def _process_notes(self) -> list[str]:
        count = self.rows[0].processes
        if count == 1:
            return []
        if self.split == "tensors":
            return [f"{count} processes held one model together and were timed together."]
        return [
            f"{count} processes shared the prompts; speedups are those of one process alone, seconds are sums over all."
        ]

    def _agreement_notes(self) -> list[str]:
        notes = [
            f"{row.label}: {row.same_texts} of {self.examples} outputs are identical to those of the 1x row."
            for row in self.rows
            if row.system == "lossless" and self.reference is None  # with a reference, 1x is another model
        ]
        if any(row.agreement for row in self.rows):
            notes.append(
                "Agreement: tokens that the checkpoint at full depth would have chosen given the same preceding tokens."
            )
        if drafted := [f"{row.label} {row.lossless_speedup:.2f}x" for row in self.rows if row.lossless_speedup]:
            notes.append(
                f"Lossless decoding at batch 1 with a row's schedule as the draft, on a sample: {', '.join(drafted)}."
            )
        return notes

    def _metrics(self) -> list[Metric]:
        return [metric_named(name) for name in self.rows[0].scores]

    def _described(self) -> dict[str, list[str]]:
        """A description of what was computed -> its metrics; parts of the test set have the same one."""
        said: dict[str, list[str]] = {}
        for name, what in self.metrics.items():
            if PART not in name:
                said.setdefault(what, []).append(metric_named(name).label)
        return said

    def _parts(self) -> list[str]:
        return list(dict.fromkeys(name.partition(PART)[2] for name in self.metrics if PART in name))

    def _timed(self) -> list[tuple[Row, Timing]]:
        sizes = range(len(self.rows[0].timings))
        return [(row, row.timings[n]) for n in sizes for row in self.rows]

    def _timing_columns(self) -> list[Column[tuple[Row, Timing]]]:
        drafted = any(timing.tokens_per_verification for _, timing in self._timed())
        return [*TIMING_COLUMNS, *(DRAFT_COLUMNS if drafted else [])]


def speed_shown(reports: Iterable[Report]) -> Over:
    """The speedup that a picture of several reports shows: end-to-end where all targets are, else decode."""
    return "all" if all(report.over == "all" for report in reports) else "decode"


def show_target(speedup: float | None, planned: float | None = None) -> str:
    """A target such as `3x`, with the planned speedup where it can't be reached; a dash where there is no target."""
    return NOT_MEASURED if speedup is None else show_planned(speedup, planned)


def show_share(share: float | None) -> str:
    """A fraction in percent; a dash where it wasn't measured."""
    return NOT_MEASURED if share is None else f"{100 * share:.1f} %"


def show_number(number: float | None) -> str:
    """A number; a dash where it wasn't measured."""
    return NOT_MEASURED if number is None else f"{number:.2f}"


def show_speed(ratio: Ratio | None) -> str:
    """A measured speedup with its quartiles; a dash where it wasn't measured."""
    return NOT_MEASURED if ratio is None else str(ratio)


def _layers_of(row: Row, schedule: dict[str, Any] | None) -> str:
    """The layers of a row's schedule at some batch size, for a table; lossless prompts run every layer."""
    if row.threshold is not None:
        return f"λ {row.threshold.value:.4g}"
    if schedule is None:
        return "-"
    found = SkipSchedule.from_dict(schedule)
    layers = f"{found.max_layers} to {found.min_layers}"
    full_prompt = row.system == "lossless" or (found.prompt == "full" and not found.stopped_layers)
    return layers if full_prompt else f"{layers}, prompt {found.prompt_depth}"


SYSTEM: Column[Row] = ("system", lambda r: r.label)
BUDGET = "max to min layers"


SPEED_COLUMNS: list[Column[Row]] = [
    SYSTEM,
    ("mean layers", lambda r: f"{r.mean_layers:.2f} of {r.num_layers}"),
    (BUDGET, lambda r: _layers_of(r, r.schedule)),
    ("target", lambda r: show_target(r.speedup_target, r.planned_speedup)),
    (SPEED_HEADERS["decode"], lambda r: str(r.speed("decode"))),
    (SPEED_HEADERS["all"], lambda r: show_speed(r.whole_speedup)),
]
TIMING_COLUMNS: list[Column[tuple[Row, Timing]]] = [
    ("system", lambda pair: pair[0].label),
    ("batch", lambda pair: str(pair[1].batch_size)),
    ("prompts", lambda pair: str(pair[1].prompts)),
    ("layers per step", lambda pair: f"{pair[1].layers_per_step:.2f}"),
    (BUDGET, lambda pair: _layers_of(pair[0], pair[1].schedule)),
    ("target", lambda pair: show_target(pair[0].speedup_target, pair[1].planned_speedup)),
    (SPEED_HEADERS["decode"], lambda pair: str(pair[1].speedup)),
    (SPEED_HEADERS["all"], lambda pair: show_speed(pair[1].whole_speedup)),
    ("prefill (s)", lambda pair: f"{pair[1].prefill_seconds:.2f}"),
    ("decode (s)", lambda pair: f"{pair[1].decode_seconds:.2f}"),
    ("tokens/s", lambda pair: f"{pair[1].tokens_per_second:.0f}"),
]


# Added to TIMING_COLUMNS where there are lossless rows.
DRAFT_COLUMNS: list[Column[tuple[Row, Timing]]] = [
    ("acceptance rate", lambda pair: show_share(pair[1].acceptance_rate)),
    ("tokens per verification", lambda pair: show_number(pair[1].tokens_per_verification)),
]


def score_column(metric: Metric, *, with_interval: bool = True) -> Column[Row]:
    """The scores of a metric; a star marks a significant difference from the 1x row."""

    def cell(row: Row) -> str:
        star = "*" if row.p_values.get(metric.name, 1.0) < SIGNIFICANT else ""
        low, high = row.intervals.get(metric.name, (None, None)) if with_interval else (None, None)
        spread = f" [{low:.1f}, {high:.1f}]" if low is not None and high is not None else ""
        return f"{row.scores[metric.name]:.2f}{star}{spread}"

    return metric.label, cell
