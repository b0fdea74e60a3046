"""Merge several runs of one benchmark at different times: medians, and the worst run."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from eval.console import make_console
from eval.output import check_new_files
from eval.results import SPEED_HEADERS, SPEED_NAMES, machine_words
from eval.speed.report import COPY_FRACTION, PEER_FIELDS, SpeedReport, SpeedRow
from eval.tables import Column, Table
from skipdecode.errors import ConfigError
from skipdecode.files import write_atomically
from skipdecode.schedule.schedule import Over

_ALIKE = ("model", "parameters", "dtype", "device", "prompt_length", "new_tokens", "over", "calibrated", "prompt_stop")
_MACHINE = ("processor", "kernels", "cores", "threads")

Value = TypeVar("Value")


def merge(paths: Sequence[Path], output: Path) -> None:
    """Write the merged tables of several reports as Markdown, and print them.

    Raises ConfigError for files that aren't reports, and for reports of different benchmarks or machines.
    """
    if output.suffix != ".md":
        raise ConfigError(f"--output {output}: --merge writes Markdown, name a .md file")
    check_new_files("--output", output)
    merged = MergedReport(tuple(SpeedReport.load(path) for path in paths))
    merged.check(paths)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, merged.to_markdown())
    console = make_console(width=200)
    for table in merged.tables():
        console.print(table.to_rich())
    for line in merged.notes():
        console.print(line, style="dim")


@dataclass(frozen=True)
class MergedReport:
    """Reports of runs of the same benchmark on the same machine."""

    runs: tuple[SpeedReport, ...]

    def check(self, names: Sequence[Path]) -> None:
        """Raise ConfigError where a run differs from the first in its conditions, or is given twice."""
        known = [
            {**asdict(run.conditions), **run.conditions.machine, "prompt_stop": _prompt_stop(run)} for run in self.runs
        ]
        for name, values, run in zip(names, known, self.runs, strict=True):
            if self.runs.count(run) > 1:
                raise ConfigError(f"--merge: {name} is the same run as another report: name each run once")
            for key in (*_ALIKE, *_MACHINE):
                found, first = values.get(key), known[0].get(key)
                if found != first:
                    raise ConfigError(
                        f"--merge is for runs of one benchmark: {key} is {found} in {name}, and {first} in {names[0]}"
                    )

    def tables(self) -> list[Table]:
        """For each batch size, a table of this library's rows, and one of the peers where there are any."""
        found: list[Table] = []
        for size in _ordered(row.batch_size for run in self.runs for row in run.rows):
            of_size = [row for run in self.runs for row in run.rows if row.batch_size == size]
            title = f"{self.runs[0].conditions.model}, {self.runs[0].conditions.dtype}, batch {size}"
            found.append(self._own(of_size, title))
            if peers := self._peers(of_size):
                found.append(Table(("peer at full depth", "runs", "prefill (s)", "tokens/s"), peers, left=1))
        return found

    def to_markdown(self) -> str:
        """The tables, and notes on how they were measured."""
        parts = []
        for table in self.tables():
            parts += [*([f"{table.title}:"] if table.title else []), table.to_markdown()]
        return "\n\n".join([*parts, "\n".join([*self.notes(), ""])])

    def notes(self) -> list[str]:
        """Sentences on how the figures were measured."""
        first = self.runs[0].conditions
        copies = _of((run.conditions.copy_bytes_per_second / 1e9 for run in self.runs), "{:.1f}", min)
        return [
            f"{first.parameters / 1e6:,.0f} M parameters, {first.dtype} on {machine_words(first.machine)}, "
            f"prompt {first.prompt_length}, {first.new_tokens} new tokens; runs "
            f"of {', '.join(run.conditions.date for run in self.runs)}.",
            f"Targets apply to the {SPEED_NAMES[first.over]} speedup. Figures are medians over runs (worst run); that "
            "of a run is the median of its repeats. Fraction of copy bandwidth: bytes that decoding must read per "
            f"second, divided by the {copies} GB/s of a large memory copy.",
            *_ordered(f"Command: `{run.conditions.command}`" for run in self.runs),
        ]

    def _own(self, rows: Sequence[SpeedRow], title: str) -> Table:
        groups = [
            [row for row in rows if (row.weights, row.speedup_target) == key]
            for key in _ordered((row.weights, row.speedup_target) for row in rows)
        ]
        columns: list[Column[list[SpeedRow]]] = [
            ("weights", lambda g: g[0].weights),
            ("target", lambda g: f"{g[0].speedup_target:g}x"),
            ("runs", lambda g: str(len(g))),
            ("mean layers", lambda g: f"{statistics.median(row.mean_layers for row in g):.2f}"),
            ("prefill (s)", lambda g: _of((row.prefill_seconds for row in g), "{:.3f}", max)),
            ("tokens/s", lambda g: _of((row.tokens_per_second for row in g), "{:.1f}", min)),
        ]
        for over, header in SPEED_HEADERS.items():
            columns.append((header, _speed(over)))
        for phase, field in PEER_FIELDS.items():
            for name in _ordered(name for row in rows for name in getattr(row, field)):
                columns.append((f"{phase} speedup over {name}", _over_peer(field, name)))
        columns.append((COPY_FRACTION, lambda g: _of((row.bandwidth_share for row in g), "{:.2f}", min)))
        return Table.of(groups, columns, title)

    def _peers(self, rows: Sequence[SpeedRow]) -> list[tuple[str, str, str, str]]:
        """The cells of each peer. All rows of a run hold the same times of a peer, so the first row suffices."""
        firsts = [own[0] for run in self.runs if (own := [row for row in rows if row in run.rows])]
        steps = self.runs[0].conditions.new_tokens - 1
        found = []
        for name in _ordered(name for row in firsts for name in row.peer_decode_seconds):
            decodes = [
                row.batch_size * steps / row.peer_decode_seconds[name] for row in firsts if name in row.over_peers
            ]
            prefills = [row.peer_prefill_seconds[name] for row in firsts if name in row.peer_prefill_seconds]
            found.append((name, str(len(decodes)), _of(prefills, "{:.3f}", max), _of(decodes, "{:.1f}", min)))
        return found


def _prompt_stop(run: SpeedReport) -> int | None:
    """The layers that prompts run before they stop, under the targets of a run."""
    return next((stop for row in run.rows if (stop := row.schedule.get("prompt_stop")) is not None), None)


def _of(values: Iterable[float], form: str, worst: Callable[[Sequence[float]], float]) -> str:
    """The median of values, with the worst in brackets where there are several, such as `2.53 (1.90)`."""
    found = list(values)
    if not found:
        return ""
    median = form.format(statistics.median(found))
    return f"{median} ({form.format(worst(found))})" if len(found) > 1 else median


def _speed(over: Over) -> Callable[[list[SpeedRow]], str]:
    return lambda rows: _of((row.speed(over).median for row in rows), "{:.2f}x", min)


def _over_peer(field: str, name: str) -> Callable[[list[SpeedRow]], str]:
    return lambda rows: _of(
        (getattr(row, field)[name].median for row in rows if name in getattr(row, field)), "{:.2f}x", min
    )


def _ordered(values: Iterable[Value]) -> list[Value]:
    """Values without duplicates, in the order of their first occurrence."""
    return list(dict.fromkeys(values))
