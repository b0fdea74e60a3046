"""The pictures of the page: frontiers, quality by position, maps of the layers that run."""

from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure

from eval.drawing import SERIES, STYLE, draw_layers, draw_quality, draw_series, error_bars, interval_of, leave_room
from eval.report.comparison import Comparison, Line, Positions
from eval.report.svg import printable, to_svg
from eval.results import SPEED_NAMES, Row
from eval.score.metric import Metric
from skipdecode import SkipSchedule

SIZE = (4.8, 3.9)  # inches: legible at the width of a phone


def frontier(comparison: Comparison, metric: Metric, key: str) -> str:
    """Draw a metric against the measured speedup, a line for each checkpoint of each run.

    Error bars are confidence intervals and quartiles of the speedup; dotted lines are full depth.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        for number, line in enumerate(comparison.lines):
            name = printable(line.name)
            draw_quality(axes, number, name, line.points, metric, comparison.over, with_intervals=True)
            colour = SERIES[number % len(SERIES)][0]
            axes.axhline(line.full_depth.scores[metric.name], color=colour, linewidth=0.9, linestyle=":", zorder=0)
        leave_room(axes, [v for line in comparison.lines for point in line.points for v in interval_of(point, metric)])
        axes.set_title(f"{metric.title}{', lower is better' if metric.lower_is_better else ''}")
        _legend(figure, [line.name for line in comparison.lines])
        title = f"{metric.title} against measured {SPEED_NAMES[comparison.over]} speedup"
        return to_svg(figure, key, title, _words(comparison, metric))


def by_position(line: Line, n: int, key: str) -> str:
    """Draw the percentage of n-grams that a reference contains by position, a line for each row."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        shown = [positions for positions in line.positions if positions.n == n and positions.bins]
        for number, positions in enumerate(shown):
            bins = positions.bins
            aside = 0.08 * (bins[0].last - bins[0].first + 1) * (number - (len(shown) - 1) / 2)
            shares = [part.share for part in bins]
            middles = [(part.first + part.last) / 2 + aside for part in bins]
            intervals = error_bars(shares, [part.interval for part in bins])
            draw_series(axes, number, printable(positions.label), middles, shares, yerr=intervals)
        leave_room(axes, [v for positions in shown for part in positions.bins for v in part.interval])
        axes.set_title(f"{'words' if n == 1 else 'word pairs'} found in a reference")
        axes.set_xlabel("position in the prediction (words)")
        axes.yaxis.set_major_formatter("{x:g} %")
        _legend(figure, [positions.label for positions in shown])
        title = f"{line.name}: percentage of predicted {n}-grams found in a reference, by position"
        return to_svg(figure, key, title, " ".join(map(_position_words, shown)))


def schedule_map(point: Row, key: str) -> str | None:
    """Draw which layer runs for which generated token; None for confidence exits, which depend on the token."""
    if point.schedule is None:
        return None
    schedule = SkipSchedule.from_dict(point.schedule)
    tokens = max(2, round(1.25 * schedule.horizon))
    with matplotlib.rc_context(STYLE | {"font.size": 8}):
        figure = Figure(figsize=(2.4, 2.0), layout="constrained")
        axes = figure.add_subplot()
        draw_layers(axes, schedule, tokens)
        axes.set_ylabel("layer")
        words = f"{schedule.max_layers} to {schedule.min_layers} of {schedule.num_layers} layers over the first "
        words += f"{schedule.horizon} tokens, {schedule.decay} decay, {schedule.placement} placement"
        return to_svg(figure, key, f"layers that run at {point.label}", words)


def _legend(figure: Figure, names: Sequence[str]) -> None:
    """Add a legend below, in as many columns as fit."""
    longest = max(map(len, names), default=0)
    columns = max(1, min(len(names), 60 // (longest + 6), 4))
    figure.legend(loc="outside lower center", ncols=columns)


def _words(comparison: Comparison, metric: Metric) -> str:
    sentences = []
    for line in comparison.lines:
        points = ", ".join(
            f"{metric.show(point.scores[metric.name])} at {point.speed(comparison.over).median:.2f}x"
            for point in line.points
        )
        sentences.append(f"{line.name}: {points}.")
    return " ".join(sentences)


def _position_words(positions: Positions) -> str:
    first, last = positions.bins[0], positions.bins[-1]
    return (
        f"{positions.label}: {first.share:.1f} % of words {first.first} to {first.last}, "
        f"{last.share:.1f} % of words {last.first} to {last.last}."
    )
