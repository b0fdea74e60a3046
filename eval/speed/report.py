"""The report of a speed benchmark, as JSON, Markdown, tables on the terminal and a picture."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import matplotlib
import rich.table
from matplotlib.figure import Figure
from pydantic import ConfigDict

from eval.drawing import MUTED, SERIES, STYLE, add_note, draw_series, error_bars, save_png
from eval.reading import AS_WRITTEN, DAMAGED, as_kind, read_json, what_is_wrong
from eval.results import SPEED_HEADERS, SPEED_NAMES, machine_words
from eval.tables import Column, Table
from skipdecode.errors import ConfigError
from skipdecode.schedule.schedule import Over, SkipSchedule
from skipdecode.timing.interleave import Ratio

MEMORY_BOUND, COPY_FRACTION = "memory-bound speedup", "fraction of copy bandwidth"
PEER_FIELDS = {"decode": "over_peers", "prefill": "prefill_over_peers"}


@dataclass(frozen=True)
class SpeedConditions:
    """The conditions of a benchmark: model, machine and settings.

    Attributes:
        copy_bytes_per_second: bytes read and written per second by large memory copies between the repeats.
        calibrated: whether schedules were solved with a calibrated profile, or the analytical cost model.
        unreachable: messages on targets that no schedule reaches.
        over: the speedup that targets apply to.
    """

    __pydantic_config__: ClassVar[ConfigDict] = AS_WRITTEN

    model: str
    parameters: int
    dtype: str
    device: str
    prompt_length: int
    new_tokens: int
    repeats: int
    calibrated: bool
    copy_bytes_per_second: float
    unreachable: list[str]
    date: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    over: Over = "decode"


@dataclass(frozen=True)
class SpeedRow:
    """One batch size, kind of weights and target.

    Attributes:
        prefill_seconds, decode_seconds, end_to_end_seconds: of one batch, medians over repeats; decode is from the
            first generated token to the last.
        tokens_per_second: decode throughput.
        wall_clock_speedup: decode seconds at full depth with the same weights, divided by those of this row.
        end_to_end_speedup: the same for prefill + decode.
        over_peers: decode seconds of each peer at full depth, divided by those of this row.
        peer_decode_seconds: decode seconds of each peer, medians over repeats.
        bound_speedup: bytes that decoding must read at full depth, divided by those of this row.
        bandwidth_share: the seconds in which a copy moves the bytes that decoding must read, divided by decode_seconds.
        cache_bytes, full_depth_cache_bytes: allocated keys and values.
        prefill_over_peers: prefill seconds of each peer divided by those of this row; empty in older reports.
        peer_prefill_seconds: prefill seconds of each peer, medians over repeats; empty in older reports.
    """

    __pydantic_config__: ClassVar[ConfigDict] = AS_WRITTEN

    batch_size: int
    weights: str
    speedup_target: float
    schedule: dict[str, Any]
    mean_layers: float
    prefill_seconds: float
    decode_seconds: float
    end_to_end_seconds: float
    tokens_per_second: float
    wall_clock_speedup: Ratio
    end_to_end_speedup: Ratio
    over_peers: dict[str, Ratio]
    peer_decode_seconds: dict[str, float]
    bound_speedup: float
    bandwidth_share: float
    cache_bytes: int
    full_depth_cache_bytes: int
    prefill_over_peers: dict[str, Ratio] = field(default_factory=dict)
    peer_prefill_seconds: dict[str, float] = field(default_factory=dict)

    def speed(self, over: Over) -> Ratio:
        """The speedup over full depth, decode or end-to-end."""
        return self.wall_clock_speedup if over == "decode" else self.end_to_end_speedup


@dataclass(frozen=True)
class SpeedReport:
    """All rows of a benchmark."""

    conditions: SpeedConditions
    rows: list[SpeedRow]

    def to_json(self) -> str:
        """The report as one JSON object: the fields of the conditions, and `rows`."""
        return json.dumps({**asdict(self.conditions), "rows": [asdict(row) for row in self.rows]}, indent=2) + "\n"

    @classmethod
    def load(cls, path: Path) -> "SpeedReport":
        """Read the output of `to_json` from a file. Raises ConfigError where it can't be read or formatted."""
        try:
            values = read_json(path)
            if not isinstance(values, dict) or not values.get("rows"):
                raise ValueError("it has no rows")
            rows = as_kind(list[SpeedRow], values.pop("rows"))
            report = cls(as_kind(SpeedConditions, values), rows)
            json.dumps(asdict(report), ensure_ascii=False, allow_nan=False).encode()
            report.to_markdown()  # fails on figures that can't be formatted
        except DAMAGED as error:
            raise ConfigError(f"{path} is not a report of a speed benchmark: {what_is_wrong(error)}") from error
        return report

    def to_markdown(self) -> str:
        """The tables of each batch size, this library's and the peers', and notes on how they were measured."""
        parts = []
        for batch_size, rows in self._by_batch():
            parts += [f"Batch {batch_size}:", *(table.to_markdown() for table in self._tables(rows))]
        return "\n\n".join([*parts, "\n".join([*self.notes(), ""])])

    def to_tables(self) -> list[rich.table.Table]:
        """The tables for the terminal."""
        title = f"{self.conditions.model}, {self.conditions.dtype}, batch"
        tables = [self._tables(rows, f"{title} {batch_size}") for batch_size, rows in self._by_batch()]
        return [table.to_rich() for of_batch in tables for table in of_batch]

    def notes(self) -> list[str]:
        """Sentences on how the figures were measured."""
        c = self.conditions
        solved = "a calibrated profile of this machine" if c.calibrated else "the analytical cost model"
        return [
            f"{c.parameters / 1e6:,.0f} M parameters, {c.dtype} on {machine_words(c.machine)}, "
            f"prompt {c.prompt_length}, {c.new_tokens} new tokens, {c.repeats} "
            f"repeats in turns, schedules solved with {solved}, torch {c.versions['torch']}, "
            f"transformers {c.versions['transformers']}, {c.date}.",
            f"Targets apply to the {SPEED_NAMES[c.over]} speedup. Speedups: seconds at full depth, of this library or "
            "of a peer, divided by those of the row; medians over repeats [quartiles]. Memory-bound speedup: bytes "
            "that decoding must read at full depth, divided by those of the row. Fraction of copy bandwidth: bytes "
            "that the row must read per second, divided by the "
            f"{c.copy_bytes_per_second / 1e9:.1f} GB/s of a large memory copy.",
            *c.unreachable,
            f"Command: `{c.command}`",
        ]

    def _by_batch(self) -> list[tuple[int, list[SpeedRow]]]:
        sizes = dict.fromkeys(row.batch_size for row in self.rows)
        return [(size, [row for row in self.rows if row.batch_size == size]) for size in sizes]

    def _tables(self, rows: Sequence[SpeedRow], title: str | None = None) -> list[Table]:
        """The tables of one batch size: this library's rows, and the peers if there are any."""
        peers = self._peers(rows[0])
        return [self._table(rows, title), *([peers] if peers.rows else [])]

    def _peers(self, row: SpeedRow) -> Table:
        tokens = row.batch_size * (self.conditions.new_tokens - 1)
        rows = [
            (
                name,
                f"{row.peer_prefill_seconds[name]:.3f}" if name in row.peer_prefill_seconds else "",
                f"{decode:.3f}",
                f"{tokens / decode:.1f}",
            )
            for name, decode in row.peer_decode_seconds.items()
        ]
        return Table(("peer at full depth", "prefill (s)", "decode (s)", "tokens/s"), rows, left=1)

    def _table(self, rows: Sequence[SpeedRow], title: str | None = None) -> Table:
        peers = [
            (f"{phase} speedup over {name}", _over_peer(field, name))
            for phase, field in PEER_FIELDS.items()
            for name in getattr(rows[0], field)
        ]
        speeds = [(header, _speed(over)) for over, header in SPEED_HEADERS.items()]
        return Table.of(rows, [*COLUMNS, *speeds, *peers, *BOUNDS], title)


def _speed(over: Over) -> Callable[[SpeedRow], str]:
    return lambda row: str(row.speed(over))


def _over_peer(field: str, name: str) -> Callable[[SpeedRow], str]:
    return lambda row: f"{getattr(row, field)[name].median:.2f}x"


COLUMNS: list[Column[SpeedRow]] = [
    ("weights", lambda r: r.weights),
    ("target", lambda r: f"{r.speedup_target:g}x"),
    ("mean layers", lambda r: f"{r.mean_layers:.2f} of {r.schedule['num_layers']}"),
    ("prompt layers", lambda r: f"{SkipSchedule.from_dict(r.schedule).prompt_depth}"),
    ("prefill (s)", lambda r: f"{r.prefill_seconds:.3f}"),
    ("decode (s)", lambda r: f"{r.decode_seconds:.3f}"),
    ("tokens/s", lambda r: f"{r.tokens_per_second:.1f}"),
]
BOUNDS: list[Column[SpeedRow]] = [
    (MEMORY_BOUND, lambda r: f"{r.bound_speedup:.2f}x"),
    ("fraction of memory-bound", lambda r: f"{r.wall_clock_speedup.median / r.bound_speedup:.2f}"),
    (COPY_FRACTION, lambda r: f"{r.bandwidth_share:.2f}"),
    ("KV cache (MB)", lambda r: f"{r.cache_bytes / 1e6:.2f}"),
]


WEIGHT_WORDS = {
    "model": "the model's own weights",
    "packed": "packed weights",
    "int8": "8-bit weights",
    "int4": "4-bit weights",
    "int4-int8-head": "4-bit layers, 8-bit LM head",
    "int8-int4-head": "8-bit layers, 4-bit LM head",
}


def draw_speeds(path: Path, report: SpeedReport) -> None:
    """Draw the measured speedup against the target into a PNG, a line for each batch size and kind of weights."""
    c = report.conditions
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        axes = figure.add_subplot()
        kinds = dict.fromkeys((row.batch_size, row.weights) for row in report.rows)
        for number, (batch_size, weights) in enumerate(kinds):
            rows = [row for row in report.rows if (row.batch_size, row.weights) == (batch_size, weights)]
            targets, speeds = [row.speedup_target for row in rows], [row.speed(c.over) for row in rows]
            medians = [speed.median for speed in speeds]
            quartiles = error_bars(medians, [(speed.lower, speed.upper) for speed in speeds])
            draw_series(
                axes,
                number,
                f"batch {batch_size}, {WEIGHT_WORDS.get(weights, weights)}",
                targets,
                medians,
                yerr=quartiles,
            )
            colour = SERIES[number % len(SERIES)][0]
            if c.over == "decode":
                axes.plot(targets, [row.bound_speedup for row in rows], color=colour, lw=1, ls="--")
        highest = max(row.speedup_target for row in report.rows)
        axes.plot([1, highest], [1, highest], color=MUTED, lw=0.9, ls=":", zorder=0)
        axes.set_xlabel("target speedup")
        axes.set_ylabel(f"measured {SPEED_NAMES[c.over]} speedup over full depth")
        axes.set_title(f"{c.model}, {c.dtype}: measured speedup against target", fontsize=12, pad=20)
        lengths = f"prompts of {c.prompt_length} tokens, {c.new_tokens} new tokens"
        bound = "dashed: memory-bound; " if c.over == "decode" else ""
        add_note(axes, f"{machine_words(c.machine)}, {lengths}; bars: quartiles; {bound}dotted: the target")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}x")
        axes.legend(loc="upper left")
        save_png(path, figure)
