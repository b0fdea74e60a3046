"""The comparison page of finished evaluations, with its Markdown and JSON."""

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
    baseline_tables,
    benchmark_tables,
    escape,
    position_table,
    quality_table,
    speed_table,
    timing_table,
)
from eval.results import SPEED_NAMES
from eval.score.metric import Metric
from eval.score.registry import metric_named
from eval.score.scores import not_computable
from eval.speed.report import SpeedReport
from skipdecode import ConfigError
from skipdecode.files import write_atomically

TEMPLATES = Path(__file__).resolve().parent / "templates"


@dataclass(frozen=True)
class Picture:
    """An inline SVG and its caption."""

    svg: Markup
    caption: str


@dataclass(frozen=True)
class PageSection:
    """The tables and pictures of one line, and the labels of its rows with confidence exits."""

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
    """Write the page of runs (`NAME=FOLDER` or `FOLDER`), and its JSON and Markdown beside it.

    Args:
        output: a .html file that doesn't exist yet.
        speed: JSON reports of `python -m eval.speed` to include.
        samples: the number of prompts whose predictions are shown.

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
        raise ConfigError("the runs have no metric in common: evaluate them with the same metrics")
    page, markdown = to_html(comparison), to_markdown(comparison)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output.with_suffix(".json"), comparison.to_json())
    write_atomically(output.with_suffix(".md"), markdown)
    write_atomically(output, page)
    make_console().print(f"page: {output}", soft_wrap=True)
    return comparison


def to_html(comparison: Comparison) -> str:
    """The self-contained page. All content of the runs is escaped."""
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
        speed=SPEED_NAMES[comparison.over],
        speed_names=SPEED_NAMES,
        frontiers=[Markup(frontier(comparison, metric, f"f{n}")) for n, metric in enumerate(metrics)],
        baselines=baseline_tables(comparison, metrics),
        sections=[_section(comparison, line, n, metrics) for n, line in enumerate(comparison.lines)],
        benchmarks=[(report, benchmark_tables(name, report)) for name, report in comparison.speeds.items()],
    )


def to_markdown(comparison: Comparison) -> str:
    """The tables and notes, for a README or an issue."""
    metrics = metrics_of(comparison)
    parts = [f"# {escape(comparison.task)}: quality against measured {SPEED_NAMES[comparison.over]} speedup", ""]
    parts += [table.to_markdown() for table in baseline_tables(comparison, metrics)]
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
    """The metrics of a comparison."""
    return [metric_named(name) for name in comparison.metrics]


def marked(text: str, other: str) -> list[tuple[str, bool]]:
    """Split a text into pieces, each with whether it differs from `other` there; spaces are kept.

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
    """Merge equal predictions of a line into one with all of their labels."""
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
