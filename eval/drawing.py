"""Drawing: the look of every picture, and the parts that several of them share."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.results import SPEEDS_IN_FULL, Report, Row, speed_shown
from eval.score.metric import Metric
from eval.score.registry import headline
from skipdecode.files import atomic_replacement
from skipdecode.schedule.schedule import Over, SkipSchedule

# Told apart in print and by colour-blind readers (Okabe and Ito), and by marker as well. Black is SVG's default, which
# matplotlib leaves out: a black that is named can be replaced by a page's style sheet.
SERIES = [("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P")]
SERIES += [("#010101", "X"), ("#999999", "*")]
INK, MUTED, RULE, EMPTY = "#222222", "#767676", "#dddddd", "#efefef"

# What every picture is drawn with. Text stays text, as it came: no mathematics between dollar signs; the same input
# gives the same bytes.
STYLE: Any = {  # its keys have a type that matplotlib keeps to itself
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
MOST_MAPS = 5  # of schedules in one picture; of more, as many evenly spaced ones


def save_png(path: Path, figure: Figure) -> None:
    """Write a figure as a PNG that is there whole or not at all."""
    with atomic_replacement(path) as partial:
        figure.savefig(partial, format="png", dpi=160)


def draw_series(axes: Axes, number: int, label: str, x: Sequence[float], y: Sequence[float], **bars: Any) -> None:
    """Draw the line of a number, in a colour and with a marker of its own; `bars` are `xerr` and `yerr`."""
    colour, marker = SERIES[number % len(SERIES)]
    dashes = "-" if number < len(SERIES) else "--"
    sizes: dict[str, Any] = {"markersize": 5.5, "linewidth": 1.6, "elinewidth": 0.9, "capsize": 2}
    axes.errorbar(x, y, label=label, color=colour, marker=marker, linestyle=dashes, **sizes, **bars)


def error_bars(values: Sequence[float], intervals: Sequence[tuple[float, float]]) -> list[list[float]]:
    """Lengths of error bars below and above; none where a resampled interval leaves its value out."""
    below = [max(0.0, value - low) for value, (low, _) in zip(values, intervals, strict=True)]
    above = [max(0.0, high - value) for value, (_, high) in zip(values, intervals, strict=True)]
    return [below, above]


def interval_of(row: Row, metric: Metric) -> tuple[float, float]:
    """The confidence interval of a score; the score alone where it has none."""
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
    """Draw a metric against a measured speed, a point for each row, with the quartiles of the speed.

    Lossless rows, which have full depth's quality at another speed, are stars beside the line. With the metric's
    confidence intervals where that is asked for.
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
        axes.plot(*places, "*", color=SERIES[number % len(SERIES)][0], markersize=10, label="lossless")
    axes.set_xlabel(f"measured speed of {SPEEDS_IN_FULL[over]}, times full depth")
    axes.xaxis.set_major_formatter("{x:g}x")


def leave_room(axes: Axes, values: Sequence[float], *, above: float = 1.0) -> None:
    """Show at least a fifth of the largest value, so that a difference of noise doesn't look like a cliff.

    `above` is the room above the middle, times that below it.
    """
    if not values:
        return
    low, high = min(values), max(values)
    half = max(0.1 * max(abs(low), abs(high)), 0.6 * (high - low)) or 0.5
    bottom = (low + high) / 2 - half
    axes.set_ylim(max(0.0, bottom) if low >= 0 else bottom, (low + high) / 2 + above * half)


def draw_layers(axes: Axes, schedule: SkipSchedule, tokens: int) -> None:
    """Fill which layer (upwards) runs for which of the first `tokens` generated tokens (to the right)."""
    layers = range(1, schedule.num_layers + 1)
    # By law 3 the tokens that a layer runs are the first ones: a bar is the whole of it.
    axes.barh(layers, [tokens] * len(layers), height=1.0, color=EMPTY, linewidth=0)
    axes.barh(layers, schedule.cutoffs(tokens), height=0.9, color=SERIES[0][0], linewidth=0)
    axes.axvline(schedule.horizon, color=MUTED, linewidth=0.9, linestyle=":")
    axes.set_xlim(0, tokens)
    axes.set_ylim(0.5, schedule.num_layers + 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.set_xlabel("generated token")
    axes.grid(visible=False)


def draw_frontier(path: Path, reports: Mapping[str, Report], title: str, *, over: Over | None = None) -> None:
    """Draw BLEU, or the first metric without it, against the measured speed, a line for each report, into a PNG.

    The speed is that of `over`; without it that of the whole where all targets are, else that of decoding.
    The first report's points carry their target or name, and mean layers; horizontal bars are the speed's quartiles. A
    line is of a report's own checkpoint; the first report's reference is a point beside it.
    """
    first = next(iter(reports.values()))
    full, metric = first.rows[0], headline(first.rows[0].scores)
    few, over = len(reports) <= 4, over or speed_shown(reports.values())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        axes = figure.add_subplot()
        for number, (name, report) in enumerate(reports.items()):
            own = [row for row in report.rows if row.checkpoint == report.checkpoint]
            rows = sorted(own, key=lambda row: row.speed(over).median)
            draw_quality(axes, number, f" {name}", rows, metric, over)  # a legend leaves out names that start with _
            if number == 0 and few:
                alike: dict[tuple[float, float], list[Row]] = {}  # targets that got the same budget, which stays
                for row in own:
                    alike.setdefault((row.mean_layers, row.scores[metric.name]), []).append(row)
                for same in alike.values():
                    _annotate(axes, same, metric, over)
        axes.axhline(full.scores[metric.name], color=MUTED, lw=0.9, ls=":", zorder=0)
        if first.reference is not None:
            reference = f" {Path(first.reference).name} at full depth"
            axes.plot(1.0, full.scores[metric.name], "o", color=MUTED, markersize=6, ls="", label=reference)
        values = [row.scores[metric.name] for report in reports.values() for row in report.rows]
        leave_room(axes, values, above=1.2)  # for the labels
        axes.margins(x=0.12)
        axes.set_ylabel(metric.label)
        axes.set_title(title, fontsize=12, pad=20)
        conditions = f"speed at batch {first.timed_batch_size}, {first.dtype}, {first.machine['processor']}"
        add_note(axes, f"{conditions}, {first.examples} prompts; bars: quartiles over batches; dotted: full depth")
        if len(reports) > 1 or first.reference is not None:
            # A few names have room below the lines; more of them would cover some.
            if few:
                axes.legend(loc="lower left")
            else:
                figure.legend(loc="outside lower center", ncols=3, fontsize=9)
        save_png(path, figure)


def _annotate(axes: Axes, rows: Sequence[Row], metric: Metric, over: Over) -> None:
    """Write what was asked for, or the names, and the layers above rows that lie beside each other."""
    targets = [f"{row.speedup_target:g}x" for row in rows if row.speedup_target is not None]
    named = [row.label for row in rows if row.speedup_target is None]
    name = ", ".join([*([f"target {', '.join(targets)}"] if targets else []), *named])
    axes.annotate(
        f"{name}\n{rows[0].mean_layers:.1f} layers",
        (statistics.fmean(row.speed(over).median for row in rows), rows[0].scores[metric.name]),
        xytext=(0, 9),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=8,
        bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.7},
    )


def add_note(axes: Axes, note: str) -> None:
    """Write a small line between a picture and its title."""
    axes.text(0, 1.02, note, transform=axes.transAxes, fontsize=8, color=MUTED)


def draw_schedules(path: Path, schedules: Mapping[float, SkipSchedule], *, tokens: int | None = None) -> None:
    """Draw a map for each target speedup into a PNG: layers upwards, generated tokens to the right, filled where run.

    `tokens` to the right; by default a quarter more than the longest horizon.
    """
    speedups = sorted(schedules)
    if len(speedups) > MOST_MAPS:
        speedups = [speedups[round(n * (len(speedups) - 1) / (MOST_MAPS - 1))] for n in range(MOST_MAPS)]
    tokens = tokens or max(round(1.25 * schedules[speedup].horizon) for speedup in speedups)
    with matplotlib.rc_context(STYLE | {"font.size": 8, "axes.titlesize": 9}):
        figure = Figure(figsize=(1.2 + 1.9 * len(speedups), 2.9), layout="constrained")
        panels = figure.subplots(1, len(speedups), sharey=True, squeeze=False)
        for axes, speedup in zip(panels[0], speedups, strict=True):
            draw_layers(axes, schedules[speedup], tokens)
            axes.set_title(f"{speedup:g}x: {schedules[speedup].mean_budget(tokens):.1f} layers")
        panels[0][0].set_ylabel("layer")
        save_png(path, figure)
