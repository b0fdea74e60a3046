"""What the page asks of a row, whatever its evaluation knew to write.

An evaluation of a checkpoint alone says nothing of systems: its rows are that checkpoint under schedules.
"""

from eval.results import Report, Row

SKIP = "skip"


def label_of(row: Row) -> str:
    """What a row, and its predictions file, is called: its own label, or its target."""
    return str(getattr(row, "label", None) or f"{row.speedup_target:g}x")


def system_of(row: Row) -> str:
    """How a row decodes: SKIP for a schedule, full depth among them, or the name of what it is measured against."""
    system = str(getattr(row, "system", None) or SKIP)
    return SKIP if system == "full depth" else system


def checkpoint_of(row: Row, report: Report) -> str:
    """What a row decodes with: the report's checkpoint, or a reference beside it."""
    return str(getattr(row, "checkpoint", None) or report.checkpoint)


def num_layers_of(row: Row) -> int:
    """Layers of the model that a row decodes with."""
    return int(getattr(row, "num_layers", None) or (row.schedule or {}).get("num_layers", 0))


def layers_per_step_of(row: Row) -> float | None:
    """Layers that a batch ran per step, where the evaluation counted them: those of the row that went deepest."""
    layers = getattr(row, "layers_per_step", None)
    return None if layers is None else float(layers)


def full_depth_of(report: Report) -> Row:
    """The 1x row, which speeds and p values are relative to. Raises StopIteration where there is none."""
    return next(row for row in report.rows if row.speedup_target == 1 and system_of(row) == SKIP)
