"""Tables for Markdown and the terminal."""

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import rich.table
from rich.console import JustifyMethod

Item = TypeVar("Item")
Column: TypeAlias = tuple[str, Callable[[Item], str]]  # a header, and the function that formats an item's cell
_BARE_BAR = re.compile(r"(?<!\\)\|")  # would end a Markdown cell


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        headers: the headers of the columns.
        rows: the cells of each row.
        title: the title on the terminal.
        left: the number of leading columns that are left-aligned; the others are right-aligned.
        bold: the indices of rows that are bold on the terminal.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str | None = None
    left: int = 0
    bold: Sequence[int] = ()

    @classmethod
    def of(cls, items: Iterable[Item], columns: Sequence[Column[Item]], title: str | None = None) -> "Table":
        """A table with a row for each item."""
        rows = [[cell(item) for _, cell in columns] for item in items]
        return cls([header for header, _ in columns], rows, title)

    def to_markdown(self) -> str:
        r"""The table in Markdown, without its title.

        >>> print(Table(["row"], [["a|b"]]).to_markdown().splitlines()[-1])
        | a\|b |
        """
        rules = ["---" if number < self.left else "---:" for number in range(len(self.headers))]
        lines = [[_BARE_BAR.sub(r"\|", cell) for cell in cells] for cells in (self.headers, rules, *self.rows)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def to_rich(self) -> rich.table.Table:
        """The table for the terminal."""
        table = rich.table.Table(title=self.title, title_justify="left")
        table.collapse_padding = len(self.headers) > 11  # wide tables don't fit on 160 columns with padding
        for number, header in enumerate(self.headers):
            justify: JustifyMethod = "left" if number < self.left else "right"
            width = max([1, *(len(cells[number]) for cells in self.rows)])  # headers don't widen columns
            header = textwrap.fill(header, width, break_long_words=False, break_on_hyphens=False)
            table.add_column(header, justify=justify, overflow="fold")
        for number, cells in enumerate(self.rows):
            table.add_row(*cells, style="bold" if number in self.bold else None)
        return table
