"""The tables of the page and of its Markdown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eval.report.comparison import Comparison, Line
from eval.report.positions import bin_width
from eval.results import BUDGET, DRAFT_COLUMNS, NOT_MEASURED, SPEED_HEADERS, TIMING_COLUMNS, Row, show_share
from eval.score.metric import Metric
from eval.speed.report import COPY_FRACTION, MEMORY_BOUND, SpeedReport, SpeedRow
from eval.tables import Table
from skipdecode.timing.interleave import Ratio


@dataclass(frozen=True)
class Part:
    """A piece of a cell: text, with its unrounded value where it is a number."""

    text: str
    value: float | None = None


Cell = tuple[Part, ...]


@dataclass(frozen=True)
class PageTable:
    """A table with a caption; the first cell of each row is the row's header."""

    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def to_markdown(self) -> str:
        """The table in Markdown, below its caption in bold."""
        rows = [[escape("".join(part.text for part in cell)) for cell in row] for row in self.rows]
        table = Table([escape(header) for header in self.headers], rows, left=1)
        return f"**{escape(self.caption)}**\n\n{table.to_markdown()}\n"


def escape(text: str) -> str:
    """Escape a text for Markdown, on one line.

    >>> print(escape("a_b | <c> [d](e)"))
    a\\_b \\| &lt;c> [d]\\(e)
    """
    plain = " ".join(text.split())
    for sign in "\\`*_|":
        plain = plain.replace(sign, f"\\{sign}")
    return plain.replace("<", "&lt;").replace("](", "]\\(")


def quality_table(line: Line, metrics: Sequence[Metric]) -> PageTable:
    """The scores of a line's rows with their intervals."""
    rows = [(_name(point), *_speeds(point), *(_score(point, metric) for metric in metrics)) for point in line.points]
    headers = ("row", "target", *SPEED_HEADERS.values(), *(_header(metric) for metric in metrics))
    if any(point.agreement for point in line.points):
        headers += ("agreement", "lossless speedup")
        rows = [(*row, *_agreement(point)) for row, point in zip(rows, line.points, strict=True)]
    return PageTable(f"{line.name}: quality", headers, tuple(rows))


def _agreement(point: Row) -> tuple[Cell, Cell]:
    """The agreement with full depth, and the speedup of lossless decoding with the row's schedule as the draft."""
    return _text(show_share(point.agreeing)), _optional(point.lossless_speedup, "{:.2f}x")


def agreement_table(line: Line) -> PageTable | None:
    """Agreement with full depth by output position, a column for each row that has it."""
    shown = [point for point in line.points if point.agreement]
    if not shown:
        return None
    width = bin_width([len(point.agreement) for point in shown])
    rows = []
    for first in range(0, max(len(point.agreement) for point in shown), width):
        parts = [point.agreement[first : first + width] for point in shown]
        shares = [sum(n for n, _ in part) / sum(of for _, of in part) if part else None for part in parts]
        rows.append((_text(f"{first + 1} to {first + width}"), *(_text(show_share(share)) for share in shares)))
    headers = ("tokens", *(point.label for point in shown))
    return PageTable(f"{line.name}: tokens equal to full depth's choice", headers, tuple(rows))


def speed_table(line: Line) -> PageTable:
    """The speedups, times and cache sizes of a line's rows."""
    rows = [
        {
            "row": _name(point),
            "mean layers": (*_number(point.mean_layers, "{:.2f}"), *_text(f" of {point.num_layers}")),
            "layers per step": _number(point.layers_per_step, "{:.2f}"),
            **dict(zip(("target", *SPEED_HEADERS.values()), _speeds(point), strict=True)),
            MEMORY_BOUND: _optional(point.bound_by_bytes, "{:.2f}x"),
            "prefill (s)": _number(point.prefill_seconds, "{:.2f}"),
            "decode (s)": _number(point.decode_seconds, "{:.2f}"),
            "tokens/s": _number(point.tokens_per_second, "{:.0f}"),
            "KV cache (MB)": (Part(f"{point.cache_bytes / 1e6:.1f}", point.cache_bytes),),
        }
        for point in line.points
    ]
    headers = [header for header in rows[0] if any(row[header] != _text("") for row in rows)]
    return PageTable(
        f"{line.name}: speed", tuple(headers), tuple(tuple(row[header] for header in headers) for row in rows)
    )


def timing_table(line: Line) -> PageTable | None:
    """Speedups by batch size; None for a report of an older version without them."""
    columns = dict(TIMING_COLUMNS)
    timed = sorted(
        ((timing, point) for point in line.points for timing in point.timings), key=lambda pair: pair[0].batch_size
    )
    drafts = dict(DRAFT_COLUMNS) if any(timing.tokens_per_verification for timing, _ in timed) else {}
    rows = [
        (
            _name(point),
            _number(timing.batch_size, "{}"),
            _number(timing.prompts, "{}"),
            _number(timing.layers_per_step, "{:.2f}"),
            _text(columns[BUDGET]((point, timing))),
            _target(point.speedup_target, timing.planned_speedup),
            _times(timing.speedup),
            _times(timing.whole_speedup),
            _number(timing.prefill_seconds, "{:.2f}"),
            _number(timing.decode_seconds, "{:.2f}"),
            _number(timing.tokens_per_second, "{:.0f}"),
            *(_text(show((point, timing))) for show in drafts.values()),
        )
        for timing, point in timed
    ]
    headers = ("row", *list(columns)[1:], *drafts)
    return PageTable(f"{line.name}: speed by batch size", headers, tuple(rows)) if rows else None


def position_table(line: Line, n: int) -> PageTable:
    """Percentages of n-grams found in a reference by position, a column for each row."""
    shown = [positions for positions in line.positions if positions.n == n and positions.bins]
    starts = sorted({(part.first, part.last) for positions in shown for part in positions.bins})
    rows = []
    for first, last in starts:
        cells: list[Cell] = [_text(f"{first} to {last}")]
        for positions in shown:
            part = next((part for part in positions.bins if part.first == first), None)
            cells.append(_ranged(part.share, part.interval, "{:.1f}") if part is not None else _text(""))
        rows.append(tuple(cells))
    headers = ("words", *(positions.label for positions in shown))
    return PageTable(f"{line.name}: percentage of {n}-grams found in a reference", headers, tuple(rows))


def baseline_tables(comparison: Comparison, metrics: Sequence[Metric]) -> list[PageTable]:
    """A table for each target, with a column for the nearest row of each line."""
    tables = []
    for nearest in comparison.baselines:
        columns = [
            (line, next(point for point in line.points if point.label == label))
            for line, label in zip(comparison.lines, nearest.labels, strict=True)
            if label is not None
        ]
        rows: list[tuple[Cell, ...]] = [
            (_text("row"), *(_name(point) for _, point in columns)),
            (_text(SPEED_HEADERS[comparison.over]), *(_times(point.speed(comparison.over)) for _, point in columns)),
            (_text("mean layers"), *(_number(point.mean_layers, "{:.2f}") for _, point in columns)),
        ]
        rows += [(_text(_header(metric)), *(_score(point, metric) for _, point in columns)) for metric in metrics]
        tables.append(PageTable(f"about {nearest.speed:g}x", ("", *(line.name for line, _ in columns)), tuple(rows)))
    return tables


def benchmark_tables(name: str, report: SpeedReport) -> list[PageTable]:
    """The tables of a speed benchmark, one for each batch size."""
    tables = []
    decode, end_to_end = SPEED_HEADERS.values()
    for size in dict.fromkeys(row.batch_size for row in report.rows):
        rows = [row for row in report.rows if row.batch_size == size]
        peers = list(dict.fromkeys(peer for row in rows for peer in row.over_peers))
        over_peers = (f"decode speedup over {peer}" for peer in peers)
        headers = ("weights", "target", "mean layers", decode, MEMORY_BOUND, end_to_end, *over_peers)
        headers += (COPY_FRACTION, "prefill (s)", "decode (s)", "tokens/s", "KV cache (MB)")
        caption = f"{name}: {report.conditions.model}, {report.conditions.dtype}, batch {size}"
        tables.append(PageTable(caption, headers, tuple(_benchmark_row(row, peers) for row in rows)))
    return tables


def _benchmark_row(row: SpeedRow, peers: Iterable[str]) -> tuple[Cell, ...]:
    return (
        _text(row.weights),
        _number(row.speedup_target, "{:g}x"),
        (*_number(row.mean_layers, "{:.2f}"), *_text(f" of {row.schedule['num_layers']}")),
        _times(row.wall_clock_speedup),
        _number(row.bound_speedup, "{:.2f}x"),
        _times(row.end_to_end_speedup),
        *(
            _number(over.median, "{:.2f}x") if over is not None else _text("")
            for over in map(row.over_peers.get, peers)
        ),
        _number(row.bandwidth_share, "{:.2f}"),
        _number(row.prefill_seconds, "{:.3f}"),
        _number(row.decode_seconds, "{:.3f}"),
        _number(row.tokens_per_second, "{:.1f}"),
        (Part(f"{row.cache_bytes / 1e6:.2f}", row.cache_bytes),),
    )


def _header(metric: Metric) -> str:
    return f"{metric.label} (lower is better)" if metric.lower_is_better else metric.label


def _text(text: str) -> Cell:
    return (Part(text),)


def _number(value: float, shape: str) -> Cell:
    return (Part(shape.format(value), value),)


def _optional(value: float | None, shape: str) -> Cell:
    return _text("") if value is None else _number(value, shape)


def _ranged(value: float, interval: Sequence[float], shape: str) -> Cell:
    low, high = interval
    ends = (Part(" ["), *_number(low, shape), Part(", "), *_number(high, shape), Part("]"))
    return (*_number(value, shape), *ends)


def _times(ratio: Ratio | None) -> Cell:
    """A speedup with its quartiles; a dash where it wasn't measured."""
    if ratio is None:
        return _text(NOT_MEASURED)
    return (*_number(ratio.median, "{:.2f}x"), *_ranged(ratio.median, (ratio.lower, ratio.upper), "{:.2f}")[1:])


def _name(point: Row) -> Cell:
    exits = () if point.threshold is None else (Part(", λ "), *_number(point.threshold.value, "{:.4g}"))
    return (Part(point.label), *exits)


def _target(target: float | None, planned: float | None) -> Cell:
    """A target, with the planned speedup where it can't be reached."""
    if target is None:
        return _text(NOT_MEASURED)
    missed = () if planned is None else (Part(" (planned "), *_number(planned, "{:.2f}x"), Part(")"))
    return (*_number(target, "{:g}x"), *missed)


def _speeds(point: Row) -> tuple[Cell, Cell, Cell]:
    target = _target(point.speedup_target, point.planned_speedup)
    return target, _times(point.speed("decode")), _times(point.whole_speedup)


def _score(point: Row, metric: Metric) -> Cell:
    """A score with its interval and the p value of its difference from the 1x row, where known."""
    shape = f"{{:.{metric.decimals}f}}"
    value, interval = point.scores[metric.name], point.intervals.get(metric.name)
    cell = _ranged(value, interval, shape) if interval is not None else _number(value, shape)
    p = point.p_values.get(metric.name)
    if p is None:
        return cell
    return (*cell, Part(", p "), Part("< 0.001" if p < 0.001 else f"{p:.3f}", p))
