"""The report of a load test, as JSON, Markdown, a table on the terminal and a picture."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import rich.table
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from eval.drawing import STYLE, add_note, draw_series, save_png
from eval.load.client import Outcome
from eval.load.request import STATIC_BATCHING, speed_of
from eval.results import machine_words
from eval.tables import Column, Table
from skipdecode.schedule.plan import rounded_down
from skipdecode.timing.interleave import Ratio

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Percentiles:
    """The median, 95th and 99th percentile of times in seconds; None where there are no values."""

    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Percentiles":
        """Percentiles with linear interpolation between the nearest two values.

        >>> Percentiles.of([3.0, 1.0, 2.0])
        Percentiles(p50=2.0, p95=2.9, p99=2.98)
        """
        if not seconds:
            return cls(None, None, None)
        return cls(*(round(float(value), 9) for value in np.percentile(seconds, PERCENTILES)))

    def __str__(self) -> str:
        """The percentiles in milliseconds."""
        return " / ".join("–" if value is None else f"{1000 * value:.0f}" for value in asdict(self).values())


@dataclass(frozen=True)
class LoadRow:
    """One system at one request rate, over all rounds. Failed requests are counted in `errors` and excluded otherwise.

    Attributes:
        rate: requests per second; infinite where all arrived at once.
        requests: the number of answered requests.
        errors: reason -> the number of failed requests.
        seconds: from the first request of a round to its last answer, median over rounds.
        tokens_per_second, requests_per_second: throughput over that time, medians over rounds.
        over_first: token throughput divided by that of the first system at this rate, over rounds.
        planned: the speedup that the server planned (median over requests) where it is below the system's target.
        first_token: time to first token, in seconds.
        between_tokens: inter-token latency, in seconds.
        whole: end-to-end latency, in seconds.
    """

    system: str
    rate: float
    requests: int
    errors: dict[str, int]
    tokens: int
    seconds: float
    tokens_per_second: float
    requests_per_second: float
    over_first: Ratio | None
    first_token: Percentiles
    between_tokens: Percentiles
    whole: Percentiles
    planned: float | None = None


def fallback_speedup(system: str, outcomes: Sequence[Outcome]) -> float | None:
    """The speedup that the server planned (median over requests) where it is below the system's target; else None."""
    target = speed_of(system)
    planned = [outcome.planned for outcome in outcomes if outcome.planned is not None]
    if target is None or not planned or (median := statistics.median(planned)) >= rounded_down(target):
        return None
    return median


def throughput(outcomes: Sequence[Outcome]) -> tuple[float, float, float]:
    """Seconds from the first request to the last answer, and tokens and requests per second over that time."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    if not good:
        return 0.0, 0.0, 0.0
    seconds = max(o.at + o.seconds for o in good) - min(o.at for o in outcomes)
    return seconds, sum(o.tokens for o in good) / seconds, len(good) / seconds


def row_of(
    system: str, rate: float, rounds: Sequence[Sequence[Outcome]], first: Sequence[Sequence[Outcome]]
) -> LoadRow:
    """The row of a system at one rate, from its outcomes in each round and those of the first system."""
    outcomes_of_all = [outcome for outcomes in rounds for outcome in outcomes]
    good = [outcome for outcome in outcomes_of_all if outcome.error is None]
    seconds, tokens, requests = zip(*(throughput(outcomes) for outcomes in rounds), strict=True)
    baseline = [throughput(outcomes)[1] for outcomes in first]
    return LoadRow(
        system=system,
        rate=rate,
        requests=len(good),
        errors=dict(Counter(outcome.error for outcome in outcomes_of_all if outcome.error is not None)),
        tokens=sum(outcome.tokens for outcome in good),
        seconds=statistics.median(seconds),
        tokens_per_second=statistics.median(tokens),
        requests_per_second=statistics.median(requests),
        over_first=Ratio.of(tokens, baseline) if all(baseline) else None,
        first_token=Percentiles.of([outcome.parts[0] for outcome in good if outcome.parts]),
        between_tokens=Percentiles.of([b - a for o in good for a, b in zip(o.parts, o.parts[1:], strict=False)]),
        whole=Percentiles.of([outcome.seconds for outcome in good]),
        planned=fallback_speedup(system, good),
    )


@dataclass(frozen=True)
class LoadConditions:
    """The settings of a load test, and the machine."""

    served: str  # the checkpoint, or the address of a running server
    task: str
    max_new_tokens: int
    requests: int
    rounds: int
    most_rows: int | None  # maximum batch size of a server started here
    streamed: bool
    waves: str | None
    date: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True)
class LoadReport:
    """The conditions and all rows."""

    conditions: LoadConditions
    rows: list[LoadRow]

    def to_json(self) -> str:
        """One JSON object: the fields of the conditions, and `rows`. An infinite rate is null."""
        rows = [{**asdict(row), "rate": None if math.isinf(row.rate) else row.rate} for row in self.rows]
        return json.dumps({**asdict(self.conditions), "rows": rows}, indent=2, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """The table, and notes on how it was measured."""
        return f"{self._table().to_markdown()}\n\n" + "\n".join([*self.notes(), ""])

    def to_table(self) -> rich.table.Table:
        """The table for the terminal."""
        return self._table(self.conditions.served).to_rich()

    def _table(self, title: str | None = None) -> Table:
        columns = COLUMNS if any(row.errors for row in self.rows) else [c for c in COLUMNS if c[0] != "errors"]
        table = Table.of(self.rows, columns, title)
        return Table(table.headers, table.rows, title, left=1)

    def notes(self) -> list[str]:
        """Sentences on how the figures were measured."""
        c = self.conditions
        how = "streamed" if c.streamed else "not streamed"
        rows = f", at most {c.most_rows} sequences at once" if c.most_rows is not None else ""
        waves = f", {c.waves}" if c.waves else ""
        lines = [
            f"{c.served}, test prompts of {c.task}, at most {c.max_new_tokens} new tokens, {how}, {c.requests} "
            f"requests per system, rate and round, {c.rounds} rounds{rows}{waves}; client and server on "
            f"{c.machine['processor']} ({c.machine['cores']} cores, {c.machine['threads']} threads), torch "
            f"{c.versions['torch']}, transformers {c.versions['transformers']}, {c.date}.",
            "Requests arrive as a Poisson process of the given rate, or all at once; every system gets the same "
            "requests at the same times. Throughput is measured from the first request of a round to its last answer "
            f"(medians over rounds) and compared with {self.rows[0].system} at the same rate [quartiles]. Latencies "
            "are the 50th / 95th / 99th percentiles over all rounds.",
        ]
        failed = [
            f"{row.system} at {_rate(row)}: {', '.join(f'{n} times {what}' for what, n in row.errors.items())}"
            for row in self.rows
            if row.errors
        ]
        missed = dict.fromkeys(row.system for row in self.rows if row.planned is not None)
        if missed:
            lines.append(
                "The server can't reach some speeds, and used the fastest schedule that the checkpoint was trained for "
                f"instead: {', '.join(missed)}."
            )
        if failed:
            lines.append(f"Failed requests are excluded from all other figures. {'; '.join(failed)}.")
        return [*lines, f"Command: `{c.command}`"]


def _rate(row: LoadRow) -> str:
    return "all at once" if math.isinf(row.rate) else f"{row.rate:g}/s"


COLUMNS: list[Column[LoadRow]] = [
    ("system", lambda r: r.system if r.planned is None else f"{r.system} (planned {r.planned:.2f}x)"),
    ("request rate", _rate),
    ("errors", lambda r: str(sum(r.errors.values()))),
    ("requests/s", lambda r: f"{r.requests_per_second:.1f}"),
    ("tokens/s", lambda r: f"{r.tokens_per_second:.0f}"),
    ("throughput vs first system", lambda r: str(r.over_first) if r.over_first else "–"),
    ("time to first token (ms)", lambda r: str(r.first_token)),
    ("inter-token latency (ms)", lambda r: str(r.between_tokens)),
    ("end-to-end latency (ms)", lambda r: str(r.whole)),
]


def _in_words(system: str) -> str:
    """A system's name in legends: `lock-step-3x` is "static batching, 3x"."""
    return system.replace(STATIC_BATCHING, "static batching, ", 1) if system.startswith(STATIC_BATCHING) else system


def draw_load(path: Path, report: LoadReport) -> None:
    """Draw the 95th percentile of the time to first token against throughput into a PNG, a line for each system.

    A point is a request rate. Where answers aren't streamed, the end-to-end latency is drawn.
    """
    c = report.conditions

    def latency(row: LoadRow) -> float | None:
        return (row.first_token if c.streamed else row.whole).p95

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        axes = figure.add_subplot()
        for number, system in enumerate(dict.fromkeys(row.system for row in report.rows)):
            rows = [row for row in report.rows if row.system == system and latency(row) is not None]
            latencies = [1000 * (latency(row) or 0.0) for row in rows]
            draw_series(axes, number, _in_words(system), [row.tokens_per_second for row in rows], latencies)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("throughput (tokens/s)")
        axes.set_ylabel(f"{'time to first token' if c.streamed else 'end-to-end latency'} (ms), 95th percentile")
        served = c.served if "://" in c.served else Path(c.served).resolve().name
        axes.set_title(f"{served}: latency against throughput", fontsize=12, pad=20)
        rates = ", ".join(dict.fromkeys(_rate(row) for row in report.rows))
        add_note(axes, f"{machine_words(c.machine)}, {c.task}; points: request rates {rates}")
        figure.legend(loc="outside lower center", ncols=4, fontsize=9)
        save_png(path, figure)
