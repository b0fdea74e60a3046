"""The page's tables, which its Markdown has too."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eval.report.comparison import Comparison, Line
from eval.report.positions import bin_width
from eval.results import DRAFT_COLUMNS, NOT_MEASURED, SPEEDS, Row, show_share, speed_headers, timing_columns
from eval.score.metric import Metric
from eval.speed.report import SpeedReport, SpeedRow
from eval.tables import Table
from skipdecode.timing.interleave import Ratio


@dataclass(frozen=True)
class Part:
    """A piece of a cell: a text, or a figure of the comparison with how it is written."""

    text: str
    value: float | None = None


Cell = tuple[Part, ...]


@dataclass(frozen=True)
class PageTable:
    """A caption, headers and rows of as many cells; the first cell of a row is its header."""

    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def to_markdown(self) -> str:
        """The same in Markdown, the caption in bold above."""
        rows = [[escape("".join(part.text for part in cell)) for cell in row] for row in self.rows]
        table = Table([escape(header) for header in self.headers], rows, left=1)
        return f"**{escape(self.caption)}**\n\n{table.to_markdown()}\n"


def escape(text: str) -> str:
    """A text that Markdown takes for nothing else, on one line.

    >>> print(escape("a_b | <c> [d](e)"))
    a\\_b \\| &lt;c> [d]\\(e)
    """
    plain = " ".join(text.split())
    for sign in "\\`*_|":
        plain = plain.replace(sign, f"\\{sign}")
    return plain.replace("<", "&lt;").replace("](", "]\\(")


def quality_table(line: Line, metrics: Sequence[Metric]) -> PageTable:
    """All scores of a run's rows with their intervals."""
    rows = [(_name(point), *_speeds(point), *(_score(point, metric) for metric in metrics)) for point in line.points]
    headers = ("row", "asked", *speed_headers(line.over), *(_header(metric) for metric in metrics))
    if any(point.agreement for point in line.points):
        headers += ("agreement", "lossless")
        rows = [(*row, *_agreement(point)) for row, point in zip(rows, line.points, strict=True)]
    return PageTable(f"{line.name}: quality", headers, tuple(rows))


def _agreement(point: Row) -> tuple[Cell, Cell]:
    """The share of tokens that full depth would have chosen, and how fast it would be if it were drafted so."""
    return _text(show_share(point.agreeing)), _optional(point.lossless_speedup, "{:.2f}x")


def agreement_table(line: Line) -> PageTable | None:
    """The same share by the place in the text, a column for each row that has it."""
    shown = [point for point in line.points if point.agreement]
    if not shown:
        return None
    width = bin_width([len(point.agreement) for point in shown])
    rows = []
    for first in range(0, max(len(point.agreement) for point in shown), width):
        places = [point.agreement[first : first + width] for point in shown]
        shares = [sum(n for n, _ in part) / sum(of for _, of in part) if part else None for part in places]
        rows.append((_text(f"{first + 1} to {first + width}"), *(_text(show_share(share)) for share in shares)))
    headers = ("tokens", *(point.label for point in shown))
    return PageTable(f"{line.name}: tokens that full depth would have chosen", headers, tuple(rows))


def speed_table(line: Line) -> PageTable:
    """Speeds of a run's rows, where their time goes, and how fast they could be by the bytes that they read."""
    decoding, whole = speed_headers(line.over)
    rows = [
        {
            "row": _name(point),
            "layers": (*_number(point.mean_layers, "{:.2f}"), *_text(f" of {point.num_layers}")),
            "layers per step": _number(point.layers_per_step, "{:.2f}"),
            **dict(zip(("asked", decoding, whole), _speeds(point), strict=True)),
            "bound": _optional(point.bound_by_bytes, "{:.2f}x"),
            "prefill s": _number(point.prefill_seconds, "{:.2f}"),
            "decode s": _number(point.decode_seconds, "{:.2f}"),
            "tokens/s": _number(point.tokens_per_second, "{:.0f}"),
            "cache MB": (Part(f"{point.cache_bytes / 1e6:.1f}", point.cache_bytes),),
        }
        for point in line.points
    ]
    headers = [header for header in rows[0] if any(row[header] != _text("") for row in rows)]
    return PageTable(
        f"{line.name}: speed", tuple(headers), tuple(tuple(row[header] for header in headers) for row in rows)
    )


def timing_table(line: Line) -> PageTable | None:
    """Speeds by batch size, one size after another; None in an older report that has none."""
    columns = dict(timing_columns(line.over))
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
            _text(columns["max to min"]((point, timing))),
            _asked(point.speedup_target, timing.planned_speedup),
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
    """Shares of n-grams by position, a column for each speed."""
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
    return PageTable(f"{line.name}: percent of {n}-grams that a reference holds", headers, tuple(rows))


def rival_tables(comparison: Comparison, metrics: Sequence[Metric]) -> list[PageTable]:
    """For each speed, every line's nearest row: a column each."""
    tables = []
    for rival in comparison.rivals:
        columns = [
            (line, next(point for point in line.points if point.label == label))
            for line, label in zip(comparison.lines, rival.labels, strict=True)
            if label is not None
        ]
        rows: list[tuple[Cell, ...]] = [
            (_text("row"), *(_name(point) for _, point in columns)),
            (_text(SPEEDS[comparison.over]), *(_times(point.speed(comparison.over)) for _, point in columns)),
            (_text("layers"), *(_number(point.mean_layers, "{:.2f}") for _, point in columns)),
        ]
        rows += [(_text(_header(metric)), *(_score(point, metric) for _, point in columns)) for metric in metrics]
        tables.append(PageTable(f"about {rival.speed:g}x", ("", *(line.name for line, _ in columns)), tuple(rows)))
    return tables


def benchmark_tables(name: str, report: SpeedReport) -> list[PageTable]:
    """A speed benchmark, a table for each batch size."""
    tables = []
    decoding, whole = speed_headers(report.conditions.over)
    for size in dict.fromkeys(row.batch_size for row in report.rows):
        rows = [row for row in report.rows if row.batch_size == size]
        peers = list(dict.fromkeys(peer for row in rows for peer in row.over_peers))
        headers = ("weights", "asked", "layers", decoding, "bound", whole, *(f"over {peer}" for peer in peers))
        headers += ("of copy", "prefill s", "decode s", "tokens/s", "cache MB")
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
    """A value with the two ends of its range."""
    low, high = interval
    ends = (Part(" ["), *_number(low, shape), Part(", "), *_number(high, shape), Part("]"))
    return (*_number(value, shape), *ends)


def _times(ratio: Ratio | None) -> Cell:
    """A speedup with its quartiles; a dash where it wasn't measured."""
    if ratio is None:
        return _text(NOT_MEASURED)
    return (*_number(ratio.median, "{:.2f}x"), *_ranged(ratio.median, (ratio.lower, ratio.upper), "{:.2f}")[1:])


def _name(point: Row) -> Cell:
    """The name of a row, and the confidence at which its tokens leave where that isn't by a schedule."""
    exits = () if point.threshold is None else (Part(", λ "), *_number(point.threshold.value, "{:.4g}"))
    return (Part(point.label), *exits)


def _asked(target: float | None, planned: float | None) -> Cell:
    """A target, with what was planned where it can't be reached."""
    if target is None:
        return _text(NOT_MEASURED)
    missed = () if planned is None else (Part(" (planned "), *_number(planned, "{:.2f}x"), Part(")"))
    return (*_number(target, "{:g}x"), *missed)


def _speeds(point: Row) -> tuple[Cell, Cell, Cell]:
    """What was asked, decoding and the whole."""
    asked = _asked(point.speedup_target, point.planned_speedup)
    return asked, _times(point.speed("decode")), _times(point.whole_speedup)


def _score(point: Row, metric: Metric) -> Cell:
    """A score, its interval and how likely it is that its difference from the 1x row is chance, where known."""
    shape = f"{{:.{metric.decimals}f}}"
    value, interval = point.scores[metric.name], point.intervals.get(metric.name)
    cell = _ranged(value, interval, shape) if interval is not None else _number(value, shape)
    p = point.p_values.get(metric.name)
    if p is None:
        return cell
    return (*cell, Part(", p "), Part("< 0.001" if p < 0.001 else f"{p:.3f}", p))
