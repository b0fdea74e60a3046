"""The picture of quality against measured speed."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from eval.results import Report
from eval.score.registry import headline
from skipdecode.files import replaced

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Told apart in print and by colour-blind readers (Okabe and Ito), and by marker as well.
STYLES = [("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P")]
STYLES += [("#000000", "X"), ("#999999", "*")]


def draw_frontier(path: Path, reports: Mapping[str, Report], title: str) -> None:
    """Draw BLEU, or the first metric without it, against the measured speedup, a line for each report, into a PNG.

    The first report's points carry their target or name, and mean layers; horizontal bars are the speed's quartiles. A
    line is of a report's own checkpoint; the first report's reference is a point beside it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    metric = headline(next(iter(reports.values())).rows[0].scores)
    figure, axes = pyplot.subplots(figsize=(7.2, 4.6), dpi=160, layout="constrained")
    few = len(reports) <= 4
    for number, (name, report) in enumerate(reports.items()):
        colour, marker = STYLES[number % len(STYLES)]
        dashes = "-" if number < len(STYLES) else "--"
        own = [row for row in report.rows if row.checkpoint == report.checkpoint]
        rows = sorted(own, key=lambda row: row.wall_clock_speedup)
        speeds, quality = [row.wall_clock_speedup for row in rows], [row.scores[metric.name] for row in rows]
        below = [max(0.0, row.wall_clock_speedup - row.wall_clock_quartiles[0]) for row in rows]
        above = [max(0.0, row.wall_clock_quartiles[1] - row.wall_clock_speedup) for row in rows]
        axes.errorbar(
            speeds,
            quality,
            xerr=[below, above],
            color=colour,
            marker=marker,
            markersize=6,
            ls=dashes,
            lw=1.8,
            elinewidth=0.9,
            capsize=2.5,
            label=name,
        )
        if number == 0:
            full = report.rows[0]
            axes.axhline(full.scores[metric.name], color="#777777", lw=0.9, ls=":", zorder=0)
            if report.reference is not None:
                reference = f"{Path(report.reference).name} at full depth"
                axes.plot(1.0, full.scores[metric.name], "o", color="#777777", markersize=6, ls="", label=reference)
            for row in rows if few else []:
                name_or_target = row.label if row.speedup_target is None else f"target {row.speedup_target:g}x"
                axes.annotate(
                    f"{name_or_target}\n{row.mean_layers:.1f} layers",
                    (row.wall_clock_speedup, row.scores[metric.name]),
                    xytext=(0, 9),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=8,
                    color="#333333",
                    bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.7},
                )
    values = [row.scores[metric.name] for report in reports.values() for row in report.rows]
    middle, half = (max(values) + min(values)) / 2, max(metric.least_range, (max(values) - min(values)) * 0.62)
    bottom = max(0.0, middle - half)
    axes.set_ylim(bottom, bottom + 2.2 * half)  # with room above for the labels
    low, high = axes.get_xlim()
    axes.set_xlim(low - 0.08 * (high - low), high + 0.08 * (high - low))
    axes.set_xlabel("measured decode speed, times full depth on the wall clock")
    axes.set_ylabel(metric.label)
    first = next(iter(reports.values()))
    axes.set_title(title, loc="left", fontsize=12, pad=20)
    conditions = f"batch {first.batch_size}, {first.dtype}, {first.machine['processor']}, {first.examples} prompts"
    note = f"{conditions}; bars: quartiles over batches; dotted: full depth"
    axes.text(0, 1.02, note, transform=axes.transAxes, fontsize=8, color="#555555")
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.grid(color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(reports) > 1 or first.reference is not None:
        # A few names have room below the lines; more of them would cover some.
        if few:
            axes.legend(frameon=False, loc="lower left")
        else:
            figure.legend(frameon=False, loc="outside lower center", ncols=3, fontsize=9)
    save_figure(path, figure)


def save_figure(path: Path, figure: "Figure") -> None:
    """Write a figure as a PNG that is there whole or not at all, and free it."""
    from matplotlib import pyplot

    with replaced(path) as partial:
        figure.savefig(partial, format="png")
    pyplot.close(figure)
