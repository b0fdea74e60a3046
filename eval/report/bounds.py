"""How much faster a row could be by the bytes that its steps read."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig

from eval.report.runs import Run
from eval.results import Report, Row
from skipdecode import ConfigError, CostModel, SkipSchedule
from skipdecode.errors import first_line


@dataclass(frozen=True)
class Bounds:
    """For each row of a report: bytes of a mean step at full depth over those of a mean step of the row.

    Attributes:
        by_row: the ratios; None where there is none.
        note: how they were counted, or why there are none.
    """

    by_row: tuple[float | None, ...]
    note: str


def bounds_of(run: Run) -> Bounds:
    """The bounds of a run whose checkpoint is here; none, and why, where it isn't."""
    report, full = run.report, run.report.rows[0]
    nothing = (None,) * len(report.rows)
    try:
        costs = {name: _cost(name, report) for name in {row.checkpoint for row in report.rows}}
    except ConfigError as error:
        return Bounds(nothing, f"no bound by bytes: {error}")
    cost = costs[full.checkpoint]
    columns = _prompt_columns(cost, report, full)
    most = _step_bytes(cost, report, full, columns)
    if columns < 1 or most is None:
        return Bounds(nothing, "no bound by bytes: the 1x row is not of a checkpoint as it is here")
    reads = [_step_bytes(costs[row.checkpoint], report, row, columns) for row in report.rows]
    note = f"bound: bytes that a step reads at full depth over the row's, batch {report.batch_size}, prompt {columns}"
    return Bounds(tuple(most / read if read else None for read in reads), note)


def _cost(checkpoint: str, report: Report) -> CostModel:
    """What a checkpoint's steps read. Raises ConfigError where its config isn't here."""
    file = Path(checkpoint) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{file} is not here")
    try:
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
        cost = CostModel.of(config, getattr(torch, report.dtype))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} can't be used: {first_line(error)}") from error
    return replace(cost, weight_bytes=1) if report.weights == "int8" else cost


def _prompt_columns(cost: CostModel, report: Report, full: Row) -> int:
    """Columns of the longest prompts, by the cache that full depth held for them (law 6)."""
    rows = min(report.batch_size, report.examples)
    a_column = cost.value_bytes * cost.cache_values * cost.num_layers * rows
    return round(full.cache_bytes / a_column) - (report.max_new_tokens - 1)


def _step_bytes(cost: CostModel, report: Report, row: Row, columns: int) -> float | None:
    """Bytes of a mean step, over as many steps as a batch took; None where no schedule says which layers run."""
    if row.schedule is None:
        return None
    schedule = SkipSchedule.from_dict(row.schedule)
    if schedule.num_layers != cost.num_layers:
        return None
    steps = max(1, round(row.decode_steps / -(-report.examples // report.batch_size)))
    rows = min(report.batch_size, report.examples)
    return sum(cost.step_bytes(schedule.budget(i), columns + i, rows) for i in range(steps)) / steps
