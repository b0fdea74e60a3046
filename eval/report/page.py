"""The page, its Markdown and its JSON: made of finished evaluations and written beside each other."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2
from markupsafe import Markup

from eval.console import make_console
from eval.output import check_new_files
from eval.report.comparison import Comparison, Line, Text, compare
from eval.report.pictures import by_position, frontier, schedule_map
from eval.report.positions import ORDERS
from eval.report.runs import read_runs
from eval.report.tables import (
    PageTable,
    agreement_table,
    benchmark_tables,
    escape,
    position_table,
    quality_table,
    rival_tables,
    speed_table,
    timing_table,
)
from eval.results import SPEEDS_IN_FULL
from eval.score.metric import Metric
from eval.score.registry import metric_named
from eval.score.scores import not_computable
from eval.speed.report import SpeedReport
from skipdecode import ConfigError
from skipdecode.files import write_atomically

TEMPLATES = Path(__file__).resolve().parent / "templates"


@dataclass(frozen=True)
class Picture:
    """An inline SVG with what stands below it."""

    svg: Markup
    caption: str


@dataclass(frozen=True)
class PageSection:
    """One line of the pictures: its tables and pictures, and the rows whose tokens leave by confidence."""

    name: str
    quality: PageTable
    speed: PageTable
    timings: PageTable | None
    agreement: PageTable | None
    positions: tuple[Picture, ...]
    no_positions: str
    position_tables: tuple[PageTable, ...]
    schedules: tuple[Picture, ...]
    by_confidence: tuple[str, ...]


def write_page(runs: Sequence[str], output: Path, *, speed: Sequence[Path] = (), samples: int = 12) -> Comparison:
    """Write the page of runs (`NAME=FOLDER` or `FOLDER`) and, beside it, its JSON and Markdown.

    Args:
        output: a .html file that isn't there yet.
        speed: files of `python -m eval.speed` to show as well.
        samples: prompts whose predictions are shown.

    Raises:
        ConfigError: before anything is written, where a run, a file or the output can't be used.
    """
    if output.suffix != ".html":
        raise ConfigError(f"--output {output}: name a .html file; a .md and a .json are written beside it")
    if samples < 0:
        raise ConfigError(f"--samples is {samples}: it must be at least 0")
    check_new_files("--output", *(output.with_suffix(suffix) for suffix in (".html", ".md", ".json")))
    stems = [file.stem for file in speed]
    names = [file.stem if stems.count(file.stem) == 1 else str(file) for file in speed]
    benchmarks = {name: SpeedReport.load(file) for name, file in zip(names, speed, strict=True)}
    comparison = compare(read_runs(runs), benchmarks, samples=samples)
    if not comparison.metrics:
        raise ConfigError("the runs share no metric: there is nothing to compare; evaluate them by the same")
    page, markdown = to_html(comparison), to_markdown(comparison)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output.with_suffix(".json"), comparison.to_json())
    write_atomically(output.with_suffix(".md"), markdown)
    write_atomically(output, page)
    make_console().print(f"page: {output}", soft_wrap=True)
    return comparison


def to_html(comparison: Comparison) -> str:
    """The page: one file that refers to no other. Whatever the runs hold is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"marked": marked, "merged": merged, "not_computable": not_computable}
    metrics = metrics_of(comparison)
    return environment.get_template("report.html").render(
        comparison=comparison,
        metrics=metrics,
        speed=SPEEDS_IN_FULL[comparison.over],
        frontiers=[Markup(frontier(comparison, metric, f"f{n}")) for n, metric in enumerate(metrics)],
        rivals=rival_tables(comparison, metrics),
        sections=[_section(comparison, line, n, metrics) for n, line in enumerate(comparison.lines)],
        benchmarks=[(report, benchmark_tables(name, report)) for name, report in comparison.speeds.items()],
    )


def to_markdown(comparison: Comparison) -> str:
    """The tables and how they were measured, for a README or an issue."""
    metrics = metrics_of(comparison)
    parts = [f"# {escape(comparison.task)}: quality against measured speed of {SPEEDS_IN_FULL[comparison.over]}", ""]
    parts += [table.to_markdown() for table in rival_tables(comparison, metrics)]
    for line in comparison.lines:
        parts += [table.to_markdown() for table in (quality_table(line, metrics), speed_table(line))]
        timings = timing_table(line)
        parts += [table.to_markdown() for table in (timings, agreement_table(line)) if table is not None]
    for name, report in comparison.speeds.items():
        parts += [table.to_markdown() for table in benchmark_tables(name, report)]
        parts += [*map(escape, report.notes()), ""]
    for conditions in comparison.conditions:
        versions = ", ".join(f"{name} {version}" for name, version in conditions.report["versions"].items())
        parts += [escape(f"{conditions.name}: {conditions.report['checkpoint']}; {versions}."), ""]
        parts += [*(f"- {escape(note)}" for note in conditions.notes), ""]
    return "\n".join(parts)


def metrics_of(comparison: Comparison) -> list[Metric]:
    """The metrics that all runs have."""
    return [metric_named(name) for name in comparison.metrics]


def marked(text: str, other: str) -> list[tuple[str, bool]]:
    """A text in pieces, each with whether `other` lacks it there: words and signs, and the spaces between as they are.

    >>> marked("a cheap pub.", "a pub by the river.")
    [('a', False), (' ', False), ('cheap', True), (' pub', False), ('.', False)]
    """
    words = _WORDS.findall(text)
    pieces: list[tuple[str, bool]] = []
    matcher = difflib.SequenceMatcher(
        None, [word for _, word in _WORDS.findall(other)], [word for _, word in words], False
    )
    for kind, _, _, start, end in matcher.get_opcodes():
        piece = "".join(space + word for space, word in words[start:end])
        if kind == "equal":
            pieces.append((piece, False))
        elif piece:
            pieces += [(words[start][0], False), (piece[len(words[start][0]) :], True)]
    return [(piece, differs) for piece, differs in pieces if piece]


_WORDS = re.compile(r"(\s*)(\w+|[^\w\s])")


def merged(texts: Sequence[Text]) -> list[Text]:
    """Merge a sample's equal texts of a line into one, which has all of their labels."""
    labels: dict[Text, list[str]] = {}
    for text in texts:
        labels.setdefault(replace(text, label=""), []).append(text.label)
    return [replace(text, label=", ".join(several)) for text, several in labels.items()]


def _section(comparison: Comparison, line: Line, number: int, metrics: Sequence[Metric]) -> PageSection:
    maps = [(point, schedule_map(point, f"s{number}-{n}")) for n, point in enumerate(line.points)]
    orders = tuple(n for n in ORDERS if any(positions.n == n and positions.bins for positions in line.positions))
    return PageSection(
        name=line.name,
        quality=quality_table(line, metrics),
        speed=speed_table(line),
        timings=timing_table(line),
        agreement=agreement_table(line),
        no_positions=line.no_positions,
        positions=tuple(Picture(Markup(by_position(line, n, f"p{number}-{n}")), "") for n in orders),
        position_tables=tuple(position_table(line, n) for n in orders),
        schedules=tuple(
            Picture(Markup(svg), f"{point.label}: {point.mean_layers:.2f} layers")
            for point, svg in maps
            if svg is not None
        ),
        by_confidence=tuple(
            f"{point.label} (λ {point.threshold.value:.4g})" for point in line.points if point.threshold is not None
        ),
    )
