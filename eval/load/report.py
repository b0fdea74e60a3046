"""The result of a benchmark under load: typed rows, as JSON, Markdown, tables on the terminal and a picture."""

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
from eval.load.request import speed_of
from eval.tables import Column, Table
from skipdecode.schedule.plan import rounded_down
from skipdecode.timing.interleave import Ratio

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Percentiles:
    """Of seconds: the median, and what one in twenty and one in a hundred exceed; None where there are none."""

    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Percentiles":
        """With linear interpolation between the nearest two.

        >>> Percentiles.of([3.0, 1.0, 2.0])
        Percentiles(p50=2.0, p95=2.9, p99=2.98)
        """
        if not seconds:
            return cls(None, None, None)
        return cls(*(round(float(value), 9) for value in np.percentile(seconds, PERCENTILES)))

    def __str__(self) -> str:
        """In milliseconds."""
        return " / ".join("–" if value is None else f"{1000 * value:.0f}" for value in asdict(self).values())


@dataclass(frozen=True)
class LoadRow:
    """One system at one rate, over all rounds. Requests that failed are counted in `errors`, and nowhere else.

    Attributes:
        rate: requests a second; infinite where all came at once.
        requests: that were answered.
        errors: how many failed, by the reason.
        seconds: from the first arrival of a round to its last answer, the median of the rounds.
        tokens_per_second, requests_per_second: over that time, medians.
        over_first: tokens a second over those of the first system at this rate, of each round.
        planned: the speedup that the server planned, the median of requests, where that is less than the system's name
            says; else None.
        first_token, between_tokens, whole: seconds from a request to the first part of its text, from each part to the
            next, and from a request to the end of its answer.
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


def shortfall(system: str, outcomes: Sequence[Outcome]) -> float | None:
    """The speedup that a server planned, the median of requests, where that is less than a system such as `3x` asks
    for; else None.
    """
    target = speed_of(system)
    planned = [outcome.planned for outcome in outcomes if outcome.planned is not None]
    if target is None or not planned or (median := statistics.median(planned)) >= rounded_down(target):
        return None
    return median


def throughput(outcomes: Sequence[Outcome]) -> tuple[float, float, float]:
    """Seconds from the first request that is sent to the last answer, and tokens and requests a second over them."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    if not good:
        return 0.0, 0.0, 0.0
    seconds = max(o.at + o.seconds for o in good) - min(o.at for o in outcomes)
    return seconds, sum(o.tokens for o in good) / seconds, len(good) / seconds


def row_of(
    system: str, rate: float, rounds: Sequence[Sequence[Outcome]], first: Sequence[Sequence[Outcome]]
) -> LoadRow:
    """The row of a system at a rate, from the outcomes of each round and those of the first system beside it."""
    every = [outcome for outcomes in rounds for outcome in outcomes]
    good = [outcome for outcome in every if outcome.error is None]
    seconds, tokens, requests = zip(*(throughput(outcomes) for outcomes in rounds), strict=True)
    beside = [throughput(outcomes)[1] for outcomes in first]
    return LoadRow(
        system=system,
        rate=rate,
        requests=len(good),
        errors=dict(Counter(outcome.error for outcome in every if outcome.error is not None)),
        tokens=sum(outcome.tokens for outcome in good),
        seconds=statistics.median(seconds),
        tokens_per_second=statistics.median(tokens),
        requests_per_second=statistics.median(requests),
        over_first=Ratio.of(tokens, beside) if all(beside) else None,
        first_token=Percentiles.of([outcome.parts[0] for outcome in good if outcome.parts]),
        between_tokens=Percentiles.of([b - a for o in good for a, b in zip(o.parts, o.parts[1:], strict=False)]),
        whole=Percentiles.of([outcome.seconds for outcome in good]),
        planned=shortfall(system, good),
    )


@dataclass(frozen=True)
class LoadConditions:
    """What was asked, where and how."""

    served: str  # a checkpoint's folder, or an address
    task: str
    max_new_tokens: int
    requests: int
    rounds: int
    most_rows: int | None  # that a server started here decodes at once
    streamed: bool
    waves: str | None
    date: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True)
class LoadReport:
    """All rows of a benchmark."""

    conditions: LoadConditions
    rows: list[LoadRow]

    def to_json(self) -> str:
        """The conditions' fields and `rows`; an infinite rate is null."""
        rows = [{**asdict(row), "rate": None if math.isinf(row.rate) else row.rate} for row in self.rows]
        return json.dumps({**asdict(self.conditions), "rows": rows}, indent=2, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """The table, and below it what it was measured with."""
        return f"{self._table().to_markdown()}\n\n" + "\n".join([*self.notes(), ""])

    def to_table(self) -> rich.table.Table:
        """The same for the terminal."""
        return self._table(self.conditions.served).to_rich()

    def _table(self, title: str | None = None) -> Table:
        columns = COLUMNS if any(row.errors for row in self.rows) else [c for c in COLUMNS if c[0] != "errors"]
        table = Table.of(self.rows, columns, title)
        return Table(table.headers, table.rows, title, left=1)

    def notes(self) -> list[str]:
        """Say how the figures were measured, a line each."""
        c = self.conditions
        how = "streamed" if c.streamed else "answers in one piece"
        rows = f", {c.most_rows} rows at most" if c.most_rows is not None else ""
        waves = f", {c.waves}" if c.waves else ""
        lines = [
            f"{c.served}, prompts of {c.task}'s test set, up to {c.max_new_tokens} new tokens, {how}, {c.requests} "
            f"requests a turn, {c.rounds} rounds in turns{rows}{waves}; client and server on "
            f"{c.machine['processor']} ({c.machine['cores']} cores, {c.machine['threads']} threads), torch "
            f"{c.versions['torch']}, transformers {c.versions['transformers']}, {c.date}.",
            "Requests come as a Poisson process of that rate, or all at once; every system gets the same at the same "
            "times. Throughput: from the first request of a round to its last answer, medians of the rounds; its ratio "
            f"is to {self.rows[0].system}'s at that rate [quartiles]. Waiting in ms, 50th / 95th / 99th percentile of "
            "all rounds.",
        ]
        wrong = [
            f"{row.system} at {_rate(row)}: {', '.join(f'{n} times {what}' for what, n in row.errors.items())}"
            for row in self.rows
            if row.errors
        ]
        missed = dict.fromkeys(row.system for row in self.rows if row.planned is not None)
        if missed:
            lines.append(
                f"Speeds that the server can't reach, in place of which the fastest schedule that the checkpoint was "
                f"trained for decoded: {', '.join(missed)}."
            )
        if wrong:
            lines.append(f"Requests that failed are in no other figure. {'; '.join(wrong)}.")
        return [*lines, f"Command: `{c.command}`"]


def _rate(row: LoadRow) -> str:
    return "all at once" if math.isinf(row.rate) else f"{row.rate:g}/s"


COLUMNS: list[Column[LoadRow]] = [
    ("system", lambda r: r.system if r.planned is None else f"{r.system} (planned {r.planned:.2f}x)"),
    ("requests come", _rate),
    ("errors", lambda r: str(sum(r.errors.values()))),
    ("requests/s", lambda r: f"{r.requests_per_second:.1f}"),
    ("tokens/s", lambda r: f"{r.tokens_per_second:.0f}"),
    ("over the first", lambda r: str(r.over_first) if r.over_first else "–"),
    ("first token, ms", lambda r: str(r.first_token)),
    ("between tokens, ms", lambda r: str(r.between_tokens)),
    ("whole, ms", lambda r: str(r.whole)),
]


def draw_load(path: Path, report: LoadReport) -> None:
    """Draw the 95th percentile of the time to the first token against throughput, a line for each system, into a PNG.

    A system's points are its rates. Where answers came in one piece, it is the time to their end.
    """
    c = report.conditions

    def wait(row: LoadRow) -> float | None:
        return (row.first_token if c.streamed else row.whole).p95

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        axes = figure.add_subplot()
        for number, system in enumerate(dict.fromkeys(row.system for row in report.rows)):
            rows = [row for row in report.rows if row.system == system and wait(row) is not None]
            waits = [1000 * (wait(row) or 0.0) for row in rows]
            draw_series(axes, number, system, [row.tokens_per_second for row in rows], waits)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("tokens a second, of all requests")
        axes.set_ylabel(f"ms to the {'first token' if c.streamed else 'whole text'}, 95th percentile")
        served = c.served if "://" in c.served else Path(c.served).resolve().name
        axes.set_title(f"{served}: the wait at each throughput", fontsize=12, pad=20)
        rates = ", ".join(dict.fromkeys(_rate(row) for row in report.rows))
        add_note(axes, f"{c.machine['processor']}, {c.task}; points: requests come {rates}")
        figure.legend(loc="outside lower center", ncols=4, fontsize=9)
        save_png(path, figure)
