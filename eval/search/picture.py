"""The picture of a search: quality against measured speedup, and by each dimension of the schedules."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.drawing import MUTED, SERIES, STYLE, error_bars, save_png
from eval.results import machine_words
from eval.score.registry import metric_named
from eval.search.report import SearchReport, TrialRow

OTHER, DEFAULT, WINNER = SERIES[0][0], SERIES[1][0], SERIES[2][0]

# The title of each panel, and the value of a row on its x axis.
DIMENSIONS: list[tuple[str, Callable[[TrialRow], Any]]] = [
    ("spread: (max - min) / (max + min)", lambda row: row.spread),
    ("warm-up layers", lambda row: row.schedule["warmup_layers"]),
    ("decay", lambda row: row.schedule["decay"]),
    ("horizon", lambda row: row.schedule["horizon"]),
]


def draw_search(path: Path, report: SearchReport) -> None:
    """Draw the difference of every schedule from the default on the same prompts into a PNG.

    The left panel is against measured speedup, with 95 % intervals for schedules tried on all prompts; the right panels
    are by spread, warm-up, decay and horizon. Markers of schedules dropped early are hollow.
    """
    with matplotlib.rc_context(STYLE):
        mosaic = "s01\ns23"  # a large panel beside two by two
        figure = Figure(figsize=(13, 5.6), layout="constrained")
        panels = figure.subplot_mosaic(mosaic, width_ratios=[1.7, 1, 1])
        main = panels["s"]
        _draw_speeds(main, report)
        for number, (title, value_of) in enumerate(DIMENSIONS):
            _draw_dimension(panels[str(number)], report, title, value_of)
        close, far = _extent(report)
        for axes in panels.values():
            _scale(axes, close, far)
        name = metric_named(report.metric).label
        default = report.row(0)
        main.set_ylabel(f"{name}, difference from the default on the same prompts")
        main.set_xlabel("measured decode speedup over full depth")
        main.xaxis.set_major_formatter("{x:.3g}x")
        figure.suptitle(
            f"{report.task} at {report.budget}: {len(report.trials)} schedules", x=0.01, ha="left", fontsize=12
        )
        main.set_title(
            f"default: {default.score.value:.2f} {name}; dotted line: full depth, {report.full_depth.value:.2f}\n"
            f"{report.prompts} validation prompts, {machine_words(report.machine)}, seed {report.seed}\n"
            "bars: 95 % intervals; hollow: dropped after fewer prompts"
            + (f"; logarithmic scale below {-close:.1f}" if far else ""),
            loc="left",
            fontsize=8,
            color=MUTED,
        )
        main.legend(loc="best", fontsize=8)
        save_png(path, figure)


def _draw_speeds(axes: Axes, report: SearchReport) -> None:
    labelled: set[str] = set()
    for row in reversed(report.trials):  # draws the best schedules on top
        style = _style(report, row)
        if style["label"] in labelled:
            del style["label"]
        else:
            labelled.add(style["label"])
        difference = row.difference
        errors = error_bars([difference.value], [(difference.low, difference.high)])
        on_all = row.prompts == report.prompts and row.trial != 0
        yerr = errors if on_all else None
        axes.errorbar([row.speedup], [difference.value], yerr=yerr, elinewidth=0.8, capsize=2, **style)
        if row.trial and on_all:
            at = row.speedup, difference.value
            axes.annotate(str(row.trial), at, xytext=(5, 4), textcoords="offset points", size=7)
    axes.axhline(0, color=DEFAULT, lw=0.8, zorder=0)
    default = report.row(0)
    axes.axhline(report.full_depth.value - default.score.value, color=MUTED, lw=0.9, ls=":", zorder=0)


def _draw_dimension(axes: Axes, report: SearchReport, title: str, value_of: Callable[[TrialRow], Any]) -> None:
    values = sorted({value_of(row) for row in report.trials})
    side_by_side = not isinstance(values[0], float)  # only the spread has a continuous axis
    at = {value: n if side_by_side else value for n, value in enumerate(values)}
    for row in reversed(report.trials):
        style = _style(report, row)
        del style["label"]
        axes.plot([at[value_of(row)]], [row.difference.value], **style)
    if side_by_side:
        axes.set_xticks(range(len(values)), [str(value)[:11] for value in values])
        axes.set_xlim(-0.6, len(values) - 0.4)
    axes.axhline(0, color=DEFAULT, lw=0.8, zorder=0)
    axes.set_title(title, fontsize=9)


def _style(report: SearchReport, row: TrialRow) -> dict[str, Any]:
    if row.trial == 0:
        label = "default (winner)" if report.winner == 0 else "default"
        return {"color": DEFAULT, "marker": "s", "ms": 8, "ls": "", "label": label, "zorder": 4}
    if row.trial == report.winner:
        return {"color": WINNER, "marker": "*", "ms": 14, "ls": "", "label": "winner", "zorder": 5}
    on_all = row.prompts == report.prompts
    face = OTHER if on_all else "white"
    label = "tried on all prompts" if on_all else "dropped early"
    return {"color": OTHER, "marker": "o", "ms": 5, "mfc": face, "ls": "", "label": label, "zorder": 3}


def _extent(report: SearchReport) -> tuple[float, float]:
    """The largest absolute interval end of schedules tried on all prompts, and the worst loss (0 unless it is far)."""
    on_all = [row.difference for row in report.trials if row.prompts == report.prompts]
    close = max(0.5, *(abs(end) for difference in on_all for end in (difference.low, difference.high)))
    worst = -min(row.difference.value for row in report.trials)
    return close, math.ceil(worst) if worst > 3 * close else 0


def _scale(axes: Axes, close: float, far: float) -> None:
    if far:
        # A logarithmic scale keeps the differences near 0 visible.
        axes.set_yscale("symlog", linthresh=close)
        ticks = [-far, -far / 4, -close, -close / 2, 0, close / 2, close]
        axes.set_yticks(ticks, [f"{tick:+.1f}" if tick else "0" for tick in ticks])
        axes.set_yticks([], minor=True)
        axes.set_ylim(-far * 1.3, close * 1.2)
    else:
        axes.yaxis.set_major_formatter("{x:+.2g}")
    axes.tick_params(labelsize=8)
