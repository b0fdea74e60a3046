"""How much faster a row could be by the bytes that its steps read."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig

from eval.report.runs import OWN, Run, full_depth_row, system_of
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
    report = run.report
    nothing = (None,) * len(report.rows)
    checkpoint = Path(report.checkpoint)
    if not (checkpoint / "config.json").is_file():
        return Bounds(nothing, f"no bound by bytes: {checkpoint / 'config.json'} is not here")
    try:
        cost = CostModel.of(AutoConfig.from_pretrained(checkpoint), getattr(torch, report.dtype))
    except (OSError, ValueError, AttributeError) as error:
        return Bounds(nothing, f"no bound by bytes: the config of {checkpoint} can't be used: {first_line(error)}")
    if report.weights == "int8":
        cost = replace(cost, weight_bytes=1)
    full = full_depth_row(report)
    columns = _prompt_columns(cost, report, full)
    if columns < 1:
        return Bounds(nothing, "no bound by bytes: the cache of the 1x row is not that of the checkpoint")
    most = _step_bytes(cost, report, full, columns)
    ratios: list[float | None] = []
    for row in report.rows:
        read = None if system_of(row) != OWN else _step_bytes(cost, report, row, columns)
        ratios.append(most / read if most and read else None)
    note = f"bound: bytes that a step reads at full depth over the row's, batch {report.batch_size}, prompt {columns}"
    return Bounds(tuple(ratios), note)


def _prompt_columns(cost: CostModel, report: Report, full: Row) -> int:
    """Columns of the longest prompts, by the cache that full depth held for them (law 6)."""
    rows = min(report.batch_size, report.examples)
    a_column = cost.value_bytes * cost.cache_values * cost.num_layers * rows
    return round(full.cache_bytes / a_column) - (report.max_new_tokens - 1)


def _step_bytes(cost: CostModel, report: Report, row: Row, columns: int) -> float | None:
    """Bytes of a mean step, over as many steps as a batch took; None for a schedule that isn't of this model."""
    try:
        schedule = SkipSchedule.from_dict(row.schedule)
    except (ConfigError, TypeError):
        return None
    if schedule.num_layers != cost.num_layers:
        return None
    steps = max(1, round(row.decode_steps / -(-report.examples // report.batch_size)))
    rows = min(report.batch_size, report.examples)
    return sum(cost.step_bytes(schedule.budget(i), columns + i, rows) for i in range(steps)) / steps
