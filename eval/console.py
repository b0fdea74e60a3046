"""The terminal that results and progress are shown on."""

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TextColumn


def make_console(*, stderr: bool = False, quiet: bool = False, width: int | None = None) -> Console:
    """A console that prints texts as they are: names of folders and files are no markup, and no emoji.

    Args:
        stderr: to standard error.
        quiet: print nothing.
        width: columns for tables where the output is a file or a pipe, which has none of its own.
    """
    console = Console(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False)
    if width is not None and not console.is_terminal:
        console.width = width
    return console


def bar_columns() -> tuple[ProgressColumn, ProgressColumn]:
    """A task's description, as it is, and its bar."""
    return TextColumn("{task.description}", markup=False), BarColumn()
