"""Tables: headers and rows of texts, for Markdown and for the terminal."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import rich.table
from rich.console import JustifyMethod

Item = TypeVar("Item")
Column: TypeAlias = tuple[str, Callable[[Item], str]]  # a header, and an item's cell below it
_BARE_BAR = re.compile(r"(?<!\\)\|")  # which would end a cell, as in a schedule file's name


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        headers: of its columns.
        rows: as many cells each.
        title: on the terminal.
        left: the number of columns, from the first, that are aligned to the left; the others are to the right.
        bold: the numbers of rows that stand out on the terminal.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str | None = None
    left: int = 0
    bold: Sequence[int] = ()

    @classmethod
    def of(cls, items: Iterable[Item], columns: Sequence[Column[Item]], title: str | None = None) -> "Table":
        """A row for each item, a cell for each column."""
        rows = [[cell(item) for _, cell in columns] for item in items]
        return cls([header for header, _ in columns], rows, title)

    def to_markdown(self) -> str:
        r"""The lines of the table, without its title.

        >>> print(Table(["row"], [["a|b"]]).to_markdown().splitlines()[-1])
        | a\|b |
        """
        rules = ["---" if number < self.left else "---:" for number in range(len(self.headers))]
        lines = [[_BARE_BAR.sub(r"\|", cell) for cell in cells] for cells in (self.headers, rules, *self.rows)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def to_rich(self) -> rich.table.Table:
        """The table for the terminal."""
        table = rich.table.Table(title=self.title, title_justify="left")
        table.collapse_padding = len(self.headers) > 11  # more don't fit on 160 columns with a blank on either side
        for number, header in enumerate(self.headers):
            justify: JustifyMethod = "left" if number < self.left else "right"
            table.add_column(header, justify=justify, overflow="fold")  # what is cut off tells nothing apart
        for number, cells in enumerate(self.rows):
            table.add_row(*cells, style="bold" if number in self.bold else None)
        return table
