"""The page's pictures: frontiers, shares by position, maps of the layers that run."""

from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.report.comparison import Comparison, Line, Point, Positions
from eval.report.svg import EMPTY, MUTED, SERIES, STYLE, printable, to_svg
from eval.score.metric import Metric
from skipdecode import SkipSchedule

SIZE = (4.8, 3.9)  # inches: legible when a phone shows it in its width


def frontier(comparison: Comparison, metric: Metric, key: str) -> str:
    """A metric against the measured speed, a line for each checkpoint of each run.

    Bars are confidence intervals and the quartiles of the speed; dotted is each run's own full depth.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        for number, line in enumerate(comparison.lines):
            colour, marker = SERIES[number % len(SERIES)]
            speeds = [point.wall_clock_speedup for point in line.points]
            values = [point.scores[metric.name] for point in line.points]
            axes.errorbar(
                speeds,
                values,
                xerr=_bars(speeds, [point.wall_clock_quartiles for point in line.points]),
                yerr=_bars(values, [_interval(point, metric) for point in line.points]),
                label=printable(line.name),
                color=colour,
                marker=marker,
                linestyle="-" if number < len(SERIES) else "--",
                markersize=5.5,
                linewidth=1.6,
                elinewidth=0.9,
                capsize=2,
            )
            axes.axhline(line.full_depth.scores[metric.name], color=colour, linewidth=0.9, linestyle=":", zorder=0)
        bounds = [v for line in comparison.lines for point in line.points for v in _interval(point, metric)]
        _leave_room(axes, bounds)
        axes.set_title(f"{metric.title}{', lower is better' if metric.lower_is_better else ''}")
        axes.set_xlabel("measured decode speed, times full depth")
        axes.xaxis.set_major_formatter("{x:g}x")
        _legend(figure, [line.name for line in comparison.lines])
        title = f"{metric.title} against measured decode speed"
        return to_svg(figure, key, title, _words(comparison.lines, metric))


def by_position(line: Line, n: int, key: str) -> str:
    """The share of a line's n-grams that a reference holds, by their position, a line for each speed."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        shown = [positions for positions in line.positions if positions.n == n and positions.bins]
        for number, positions in enumerate(shown):
            colour, marker = SERIES[number % len(SERIES)]
            bins = positions.bins
            aside = 0.08 * (bins[0].last - bins[0].first + 1) * (number - (len(shown) - 1) / 2)
            shares = [part.share for part in bins]
            axes.errorbar(
                [(part.first + part.last) / 2 + aside for part in bins],
                shares,
                yerr=_bars(shares, [part.interval for part in bins]),
                label=printable(positions.label),
                color=colour,
                marker=marker,
                linestyle="-" if number < len(SERIES) else "--",
                markersize=4.5,
                linewidth=1.4,
                elinewidth=0.9,
            )
        _leave_room(axes, [v for positions in shown for part in positions.bins for v in part.interval])
        axes.set_title(f"{'words' if n == 1 else 'pairs of words'} that a reference holds")
        axes.set_xlabel("position in the prediction, words")
        axes.yaxis.set_major_formatter("{x:g} %")
        _legend(figure, [positions.label for positions in shown])
        title = f"{line.name}: share of predicted {n}-grams that a reference holds, by position"
        return to_svg(figure, key, title, " ".join(map(_position_words, shown)))


def schedule_map(point: Point, key: str) -> str | None:
    """Which layer runs for which generated token; None where that is up to the token."""
    if point.schedule is None:
        return None
    schedule = SkipSchedule.from_dict(point.schedule)
    tokens = max(2, round(1.25 * schedule.horizon))
    cutoffs = schedule.cutoffs(tokens)
    with matplotlib.rc_context(STYLE | {"font.size": 8, "axes.grid": False}):
        figure = Figure(figsize=(2.4, 2.0), layout="constrained")
        axes = figure.add_subplot()
        layers = range(1, schedule.num_layers + 1)
        # By law 3 the tokens that a layer runs are the first ones: a bar is the whole of it.
        axes.barh(layers, [tokens] * len(layers), height=1.0, color=EMPTY, linewidth=0)
        axes.barh(layers, cutoffs, height=0.9, color=SERIES[0][0], linewidth=0)
        axes.axvline(schedule.horizon, color=MUTED, linewidth=0.9, linestyle=":")
        axes.set_xlim(0, tokens)
        axes.set_ylim(0.5, schedule.num_layers + 0.5)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        axes.set_xlabel("generated token")
        axes.set_ylabel("layer")
        words = f"{schedule.max_layers} to {schedule.min_layers} of {schedule.num_layers} layers over the first "
        words += f"{schedule.horizon} tokens, {schedule.decay} decay, placed {schedule.placement}"
        return to_svg(figure, key, f"layers that run at {point.label}", words)


def _bars(values: Sequence[float], intervals: Sequence[tuple[float, float]]) -> list[list[float]]:
    """Lengths of error bars below and above; none where a resampled interval leaves its value out."""
    below = [max(0.0, value - low) for value, (low, _) in zip(values, intervals, strict=True)]
    above = [max(0.0, high - value) for value, (_, high) in zip(values, intervals, strict=True)]
    return [below, above]


def _interval(point: Point, metric: Metric) -> tuple[float, float]:
    value = point.scores[metric.name]
    return point.intervals.get(metric.name, (value, value))


def _leave_room(axes: Axes, values: Sequence[float]) -> None:
    """At least a fifth of the largest value in sight, so that a difference of noise doesn't look like a cliff."""
    if not values:
        return
    low, high = min(values), max(values)
    half = max(0.1 * max(abs(low), abs(high)), 0.6 * (high - low)) or 0.5
    bottom = (low + high) / 2 - half
    axes.set_ylim(max(0.0, bottom) if low >= 0 else bottom, (low + high) / 2 + half)


def _legend(figure: Figure, names: Sequence[str]) -> None:
    """A legend below, in as many columns as the names leave room for."""
    longest = max(map(len, names), default=0)
    columns = max(1, min(len(names), 60 // (longest + 6), 4))
    figure.legend(loc="outside lower center", ncols=columns)


def _words(lines: Sequence[Line], metric: Metric) -> str:
    sentences = []
    for line in lines:
        points = ", ".join(
            f"{metric.show(point.scores[metric.name])} at {point.wall_clock_speedup:.2f}x" for point in line.points
        )
        sentences.append(f"{line.name}: {points}.")
    return " ".join(sentences)


def _position_words(positions: Positions) -> str:
    first, last = positions.bins[0], positions.bins[-1]
    return (
        f"{positions.label}: {first.share:.1f} % of words {first.first} to {first.last}, "
        f"{last.share:.1f} % of words {last.first} to {last.last}."
    )
