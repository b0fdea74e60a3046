"""The style of all pictures, and what several of them draw."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.path import Path as Line
from matplotlib.text import Annotation
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from eval.results import SPEED_NAMES, Report, Row, machine_words, speed_shown
from eval.score.metric import Metric
from eval.score.registry import headline
from skipdecode.files import atomic_replacement
from skipdecode.schedule.schedule import Over, SkipSchedule

# Colours that colour-blind readers and black-and-white print can distinguish (Okabe and Ito), each with a marker. Not
# #000000, which matplotlib omits from SVG as the default, so that a style sheet couldn't replace it.
SERIES = [("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P")]
SERIES += [("#010101", "X"), ("#999999", "*")]
INK, MUTED, RULE, EMPTY = "#222222", "#767676", "#dddddd", "#efefef"

# Text stays text in SVG, dollar signs don't start mathematics, and the same input gives the same bytes.
STYLE: Any = {  # matplotlib doesn't export the type of its keys
    "svg.fonttype": "none",
    "svg.hashsalt": "skipdecode",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}
# Places of a label around its point: offset in points, horizontal and vertical alignment; the first ones are preferred.
_PLACES = [((0, 9), "center", "bottom"), ((0, -9), "center", "top"), ((-9, 9), "right", "bottom")]
_PLACES += [((9, 9), "left", "bottom"), ((-9, -9), "right", "top"), ((9, -9), "left", "top")]
_PLACES += [((-9, 0), "right", "center"), ((9, 0), "left", "center"), ((0, 36), "center", "bottom")]
MAX_MAPS = 5  # schedules in one picture; of more, this many evenly spaced ones are drawn


def save_png(path: Path, figure: Figure) -> None:
    """Write a figure as a PNG, atomically."""
    with atomic_replacement(path) as partial:
        figure.savefig(partial, format="png", dpi=160)


def draw_series(axes: Axes, number: int, label: str, x: Sequence[float], y: Sequence[float], **bars: Any) -> None:
    """Draw line `number` in its own colour and marker; `bars` are `xerr` and `yerr`."""
    colour, marker = SERIES[number % len(SERIES)]
    dashes = "-" if number < len(SERIES) else "--"
    sizes: dict[str, Any] = {"markersize": 5.5, "linewidth": 1.6, "elinewidth": 0.9, "capsize": 2}
    axes.errorbar(x, y, label=label, color=colour, marker=marker, linestyle=dashes, **sizes, **bars)


def error_bars(values: Sequence[float], intervals: Sequence[tuple[float, float]]) -> list[list[float]]:
    """Lengths of error bars below and above; 0 on the side where a bootstrap interval excludes its value."""
    below = [max(0.0, value - low) for value, (low, _) in zip(values, intervals, strict=True)]
    above = [max(0.0, high - value) for value, (_, high) in zip(values, intervals, strict=True)]
    return [below, above]


def interval_of(row: Row, metric: Metric) -> tuple[float, float]:
    """The confidence interval of a score, empty around the score where it has none."""
    return row.intervals.get(metric.name, (row.scores[metric.name],) * 2)


def draw_quality(
    axes: Axes,
    number: int,
    label: str,
    rows: Sequence[Row],
    metric: Metric,
    over: Over,
    *,
    with_intervals: bool = False,
) -> None:
    """Draw a metric against the measured speedup, a point for each row, with the quartiles of the speedup.

    Lossless rows, which have the quality of full depth, are stars beside the line. `with_intervals` adds the confidence
    intervals of the metric.
    """
    skipping = [row for row in rows if row.system != "lossless"]
    speeds = [row.speed(over) for row in skipping]
    medians = [speed.median for speed in speeds]
    quartiles = error_bars(medians, [(speed.lower, speed.upper) for speed in speeds])
    values = [row.scores[metric.name] for row in skipping]
    intervals = error_bars(values, [interval_of(row, metric) for row in skipping]) if with_intervals else None
    draw_series(axes, number, label, medians, values, xerr=quartiles, yerr=intervals)
    if lossless := [row for row in rows if row.system == "lossless"]:
        places = [row.speed(over).median for row in lossless], [row.scores[metric.name] for row in lossless]
        label = f"{label.strip()}, lossless (the output of full depth)"
        axes.plot(*places, "*", color=SERIES[number % len(SERIES)][0], markersize=10, label=f" {label}")
    axes.set_xlabel(f"measured {SPEED_NAMES[over]} speedup over full depth")
    axes.xaxis.set_major_formatter("{x:g}x")


def leave_room(axes: Axes, values: Sequence[float], *, above: float = 1.0) -> None:
    """Make the y axis span at least a fifth of the largest value, so that noise doesn't look like a large difference.

    `above` is the space above the middle divided by that below it.
    """
    if not values:
        return
    low, high = min(values), max(values)
    half = max(0.1 * max(abs(low), abs(high)), 0.6 * (high - low)) or 0.5
    bottom = (low + high) / 2 - half
    axes.set_ylim(max(0.0, bottom) if low >= 0 else bottom, (low + high) / 2 + above * half)


def draw_layers(axes: Axes, schedule: SkipSchedule, tokens: int) -> None:
    """Draw which layer (y axis) runs for which of the first `tokens` generated tokens (x axis)."""
    layers = range(1, schedule.num_layers + 1)
    # The tokens that run a layer are a prefix of the sequence (docs/explanation.md), so one bar per layer suffices.
    axes.barh(layers, [tokens] * len(layers), height=1.0, color=EMPTY, linewidth=0)
    axes.barh(layers, schedule.cutoffs(tokens), height=0.9, color=SERIES[0][0], linewidth=0)
    if _decays(schedule):
        axes.axvline(schedule.horizon, color=MUTED, linewidth=0.9, linestyle=":")
    axes.set_xlim(0, tokens)
    axes.set_ylim(0.5, schedule.num_layers + 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.set_xlabel("generated token")
    axes.grid(visible=False)


def _decays(schedule: SkipSchedule) -> bool:
    """Whether the number of layers changes at all before the horizon."""
    return schedule.max_layers > schedule.min_layers


def draw_frontier(path: Path, reports: Mapping[str, Report], title: str, *, over: Over | None = None) -> None:
    """Draw BLEU (else the first metric) against the measured speedup into a PNG, a line for each report.

    `over` selects the speedup; by default end-to-end where all targets are, else decode. Points of the first report are
    annotated with target or name and mean layers; horizontal bars are the quartiles of the speedup. A line shows the
    rows of a report's own checkpoint; the reference of the first report is a separate point.
    """
    first = next(iter(reports.values()))
    full, metric = first.rows[0], headline(first.rows[0].scores)
    few, over = len(reports) <= 4, over or speed_shown(reports.values())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        axes = figure.add_subplot()
        for number, (name, report) in enumerate(reports.items()):
            rows = sorted(_own_rows(report), key=lambda row: row.speed(over).median)
            draw_quality(axes, number, f" {name}", rows, metric, over)  # legends omit names that start with _
        axes.axhline(full.scores[metric.name], color=MUTED, lw=0.9, ls=":", zorder=0)
        if first.reference is not None:
            reference = f" {Path(first.reference).name} at full depth"
            axes.plot(1.0, full.scores[metric.name], "o", color=MUTED, markersize=6, ls="", label=reference)
        values = [row.scores[metric.name] for report in reports.values() for row in report.rows]
        leave_room(axes, values, above=1.2)  # for the labels
        axes.margins(x=0.12)
        axes.set_ylabel(metric.label)
        axes.set_title(title, fontsize=12, pad=32)
        conditions = f"speedup at batch {first.timed_batch_size}, {first.dtype}, {machine_words(first.machine)}"
        lines = "a line: one checkpoint (one training seed); bars: quartiles over batches; dotted line: full depth"
        add_note(axes, f"{conditions}, {first.examples} prompts\n{lines}")
        if len(reports) > 1 or first.reference is not None:
            figure.legend(loc="outside lower center", ncols=3, fontsize=9)
        if few:
            _label_points(axes, reports, metric, over)
        save_png(path, figure)


def _own_rows(report: Report) -> list[Row]:
    """The rows of a report's own checkpoint."""
    return [row for row in report.rows if row.checkpoint == report.checkpoint]


def _label_points(axes: Axes, reports: Mapping[str, Report], metric: Metric, over: Over) -> None:
    """Write targets or names, and mean layers, beside the points of the first report, where they cover least."""
    own = _own_rows(next(iter(reports.values())))
    alike: dict[tuple[float, float], list[Row]] = {}  # targets with the same constant schedule share a label
    for row in own:
        alike.setdefault((row.mean_layers, row.scores[metric.name]), []).append(row)
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # settles where points are
    curves = [
        sorted((row.speed(over).median, row.scores[metric.name]) for row in _own_rows(report))
        for report in reports.values()
    ]
    curves += [
        [(row.speed(over).lower, row.scores[metric.name]), (row.speed(over).upper, row.scores[metric.name])]
        for row in own
    ]
    drawn = [axes.transData.transform_path(Line(curve)) for curve in curves]
    taken: list[Bbox] = []
    for rows in alike.values():
        label = _annotate(axes, rows, metric, over)

        def covered(place: tuple[tuple[int, int], str, str], label: Annotation = label) -> int:
            label.xyann, horizontal, vertical = place
            label.set(ha=horizontal, va=vertical)
            box = label.get_window_extent()
            outside = not axes.bbox.containsx(box.x0) or not axes.bbox.containsx(box.x1) or box.y0 < axes.bbox.y0
            others = sum(box.overlaps(other) for other in taken)
            return 100 * others + 10 * outside + sum(line.intersects_bbox(box, filled=False) for line in drawn)

        covered(min(_PLACES, key=covered))
        taken.append(label.get_window_extent())


def _annotate(axes: Axes, rows: Sequence[Row], metric: Metric, over: Over) -> Annotation:
    """A label with the targets or names, and the mean layers, of rows that have the same schedule."""
    targets = [f"{row.speedup_target:g}x" for row in rows if row.speedup_target is not None]
    named = [row.label for row in rows if row.speedup_target is None]
    name = ", ".join([*([f"target {', '.join(targets)}"] if targets else []), *named])
    return axes.annotate(
        f"{name}\n{rows[0].mean_layers:.1f} layers",
        (statistics.fmean(row.speed(over).median for row in rows), rows[0].scores[metric.name]),
        textcoords="offset points",
        xytext=(0, 0),
        fontsize=8,
        in_layout=False,
        bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.7},
    )


def add_note(axes: Axes, note: str) -> None:
    """Write a small line between the picture and its title."""
    axes.text(0, 1.02, note, transform=axes.transAxes, fontsize=8, color=MUTED)


def draw_schedules(path: Path, schedules: Mapping[float, SkipSchedule], *, tokens: int | None = None) -> None:
    """Draw which layer runs for which generated token into a PNG, a panel for each target speedup.

    `tokens` is the length of the x axis; by default 1.25 times the longest horizon.
    """
    speedups = sorted(schedules)
    if len(speedups) > MAX_MAPS:
        speedups = [speedups[round(n * (len(speedups) - 1) / (MAX_MAPS - 1))] for n in range(MAX_MAPS)]
    tokens = tokens or max(round(1.25 * schedules[speedup].horizon) for speedup in speedups)
    shown = [schedules[speedup] for speedup in speedups]
    with matplotlib.rc_context(STYLE | {"font.size": 8, "axes.titlesize": 9}):
        figure = Figure(figsize=(1.2 + 1.9 * len(speedups), 3.1), layout="constrained")
        panels = figure.subplots(1, len(speedups), sharey=True, squeeze=False)
        for axes, speedup, schedule in zip(panels[0], speedups, shown, strict=True):
            draw_layers(axes, schedule, tokens)
            layers = f"{schedule.mean_budget(tokens):.1f}" if _decays(schedule) else f"{schedule.max_layers}"
            axes.set_title(f"target {speedup:g}x: {layers} layers")
        panels[0][0].set_ylabel("layer")
        keys: list[Any] = [Patch(color=SERIES[0][0], label="runs"), Patch(color=EMPTY, label="is bypassed")]
        if any(map(_decays, shown)):
            keys.append(Line2D([], [], color=MUTED, linewidth=0.9, linestyle=":", label="horizon of the decay"))
        figure.legend(handles=keys, loc="outside lower center", ncols=len(keys))
        save_png(path, figure)
