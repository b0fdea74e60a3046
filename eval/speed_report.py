"""The result of a speed benchmark: typed rows, as JSON, Markdown, tables on the terminal and a picture."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from eval.frontier import STYLES, save_figure
from skipdecode.errors import ConfigError
from skipdecode.ratio import Ratio


@dataclass(frozen=True)
class Conditions:
    """What was measured, where and how.

    Attributes:
        copy_bytes_per_second: bytes that a large copy read and wrote each second, in between the repeats.
        calibrated: whether schedules were solved for this machine's clock, or for the predicted one.
        unreachable: targets that no schedule reaches, and why.
    """

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


@dataclass(frozen=True)
class SpeedRow:
    """One batch size, kind of weights and target.

    Attributes:
        prefill_seconds, decode_seconds, end_to_end_seconds: of one batch, medians over repeats; decoding is from the
            first new token to the last.
        tokens_per_second: of decoding.
        wall_clock_speedup: decoding at full depth by this decoder with the same weights, over this row's.
        end_to_end_speedup: the same with the prefill.
        over_peers: decoding by each peer, at full depth, over this row's.
        bound_speedup: bytes that full depth must read, over those of this row.
        bandwidth_share: the time in which a copy would move the bytes that this row must read, over decode_seconds.
        cache_bytes, full_depth_cache_bytes: of keys and values held.
    """

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


@dataclass(frozen=True)
class SpeedReport:
    """All rows of a benchmark."""

    conditions: Conditions
    rows: list[SpeedRow]

    def to_json(self) -> str:
        """The conditions' fields and `rows`."""
        return json.dumps({**asdict(self.conditions), "rows": [asdict(row) for row in self.rows]}, indent=2) + "\n"

    @classmethod
    def load(cls, path: Path) -> "SpeedReport":
        """The report of a file that holds what `to_json` gives. Raises ConfigError where it can't be read."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            rows = [_read_row(row) for row in values.pop("rows")]
            return cls(Conditions(**values), rows)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path} is no report of a speed benchmark: {error}") from error

    def to_markdown(self) -> str:
        """A table for each batch size, and below what they were measured with."""
        lines = []
        for batch_size, rows in self._by_batch():
            heads = self._heads(rows)
            lines += [f"Batch {batch_size}:", "", "| " + " | ".join(heads) + " |", "|" + " ---: |" * len(heads)]
            lines += ["| " + " | ".join(self._cells(row)) + " |" for row in rows]
            lines.append("")
        return "\n".join([*lines, *self.notes(), ""])

    def to_tables(self) -> list[Table]:
        """The same for the terminal."""
        tables = []
        for batch_size, rows in self._by_batch():
            table = Table(title=f"{self.conditions.model}, {self.conditions.dtype}, batch {batch_size}")
            for head in self._heads(rows):
                table.add_column(head, justify="right")
            for row in rows:
                table.add_row(*self._cells(row))
            tables.append(table)
        return tables

    def notes(self) -> list[str]:
        """How the figures were measured, a line each."""
        c = self.conditions
        solved = "calibrated on this machine" if c.calibrated else "predicted"
        return [
            f"{c.parameters / 1e6:,.0f} M parameters, {c.dtype} on {c.machine['processor']} "
            f"({c.machine['threads']} threads), prompt {c.prompt_length}, {c.new_tokens} new tokens, {c.repeats} "
            f"repeats in turns, schedules {solved}, torch {c.versions['torch']}, "
            f"transformers {c.versions['transformers']}, {c.date}.",
            "Speed: decode seconds at full depth, or of the peer at full depth, over the row's; medians of the ratios "
            "in each repeat [quartiles]. Bound: bytes that must be read, full depth's over the row's. Of copy: the "
            f"time of that many bytes at {c.copy_bytes_per_second / 1e9:.1f} GB/s, which a large copy reaches here, "
            "over the row's.",
            *c.unreachable,
            f"Command: `{c.command}`",
        ]

    def _by_batch(self) -> list[tuple[int, list[SpeedRow]]]:
        sizes = dict.fromkeys(row.batch_size for row in self.rows)
        return [(size, [row for row in self.rows if row.batch_size == size]) for size in sizes]

    def _heads(self, rows: Sequence[SpeedRow]) -> list[str]:
        first = ["weights", "target", "layers", "prefill s", "decode s", "tokens/s", "speed", "end to end"]
        peers = [f"over {name}" for name in rows[0].over_peers]
        return [*first, *peers, "bound", "of bound", "of copy", "cache MB"]

    def _cells(self, row: SpeedRow) -> list[str]:
        return [
            row.weights,
            f"{row.speedup_target:g}x",
            f"{row.mean_layers:.2f} of {row.schedule['num_layers']}",
            f"{row.prefill_seconds:.3f}",
            f"{row.decode_seconds:.3f}",
            f"{row.tokens_per_second:.1f}",
            str(row.wall_clock_speedup),
            f"{row.end_to_end_speedup.median:.2f}x",
            *(f"{ratio.median:.2f}x" for ratio in row.over_peers.values()),
            f"{row.bound_speedup:.2f}x",
            f"{row.wall_clock_speedup.median / row.bound_speedup:.2f}",
            f"{row.bandwidth_share:.2f}",
            f"{row.cache_bytes / 1e6:.2f}",
        ]


def _read_row(values: dict[str, Any]) -> SpeedRow:
    """A row as JSON gives it, which has no ratios."""
    ratios = {name: Ratio(**values[name]) for name in ("wall_clock_speedup", "end_to_end_speedup")}
    peers = {name: Ratio(**ratio) for name, ratio in values["over_peers"].items()}
    return SpeedRow(**{**values, **ratios, "over_peers": peers})


def draw_speeds(path: Path, report: SpeedReport) -> None:
    """Draw measured speed against the target, a line for each batch size and kind of weights, into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.6), dpi=160, layout="constrained")
    kinds = dict.fromkeys((row.batch_size, row.weights) for row in report.rows)
    for number, (batch_size, weights) in enumerate(kinds):
        colour, marker = STYLES[number % len(STYLES)]
        rows = [row for row in report.rows if (row.batch_size, row.weights) == (batch_size, weights)]
        targets, speeds = [row.speedup_target for row in rows], [row.wall_clock_speedup for row in rows]
        spread = [[s.median - s.lower for s in speeds], [s.upper - s.median for s in speeds]]
        label = f"batch {batch_size}, {weights} weights"
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 6, "lw": 1.8, "capsize": 2.5}
        axes.errorbar(targets, [s.median for s in speeds], yerr=spread, label=label, **style)
        axes.plot(targets, [row.bound_speedup for row in rows], color=colour, lw=1, ls="--")
    highest = max(row.speedup_target for row in report.rows)
    axes.plot([1, highest], [1, highest], color="#777777", lw=0.9, ls=":", zorder=0)
    axes.set_xlabel("target speedup")
    axes.set_ylabel("measured decode speed, times full depth")
    c = report.conditions
    axes.set_title(f"{c.model}, {c.dtype}: measured speed against the target", loc="left", fontsize=12, pad=20)
    note = f"{c.machine['processor']}, prompt {c.prompt_length}, {c.new_tokens} new tokens; bars: quartiles; "
    note += "dashed: bytes to read; dotted: the target"
    axes.text(0, 1.02, note, transform=axes.transAxes, fontsize=8, color="#555555")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}x")
    axes.grid(color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    save_figure(path, figure)
