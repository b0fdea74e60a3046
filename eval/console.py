"""Consoles and progress bars."""

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TextColumn


def make_console(*, stderr: bool = False, quiet: bool = False, width: int | None = None) -> Console:
    """A console that prints text literally, without markup or emoji, since file names may look like either.

    Args:
        stderr: print to standard error.
        quiet: print nothing.
        width: the width in columns where the output is not a terminal.
    """
    console = Console(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False)
    if width is not None and not console.is_terminal:
        console.width = width
    return console


def bar_columns() -> tuple[ProgressColumn, ProgressColumn]:
    """The columns of a progress bar: its description without markup, and the bar."""
    return TextColumn("{task.description}", markup=False), BarColumn()
