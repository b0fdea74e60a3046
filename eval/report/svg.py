"""Matplotlib figures as inline SVG for pages with a light and a dark colour scheme."""

import re
from html import escape
from io import StringIO
from typing import TYPE_CHECKING

import matplotlib

from eval.drawing import EMPTY, INK, MUTED, RULE, SERIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that the style sheet of the page defines as variables, with a light and a dark value each.
_VARIABLES = {INK: "ink", MUTED: "muted", RULE: "rule", EMPTY: "empty"}
_VARIABLES |= {colour.lower(): f"series-{number}" for number, (colour, _) in enumerate(SERIES)}


def printable(text: str) -> str:
    """Text that is valid in XML. The leading space keeps names that start with _ in legends."""
    return " " + "".join(character if character.isprintable() else "\ufffd" for character in text)


def to_svg(figure: "Figure", key: str, title: str, description: str) -> str:
    """The `svg` element of a figure, without a background.

    Args:
        figure: drawn in the colours above.
        key: a prefix that makes its ids unique in the page.
        title: the title for screen readers.
        description: what it shows, in words and numbers, for screen readers.
    """
    drawn = StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": key}):  # seeds the ids that other elements refer to
        figure.savefig(drawn, format="svg", transparent=True, metadata=no_metadata)
    box = re.search('viewBox="[^"]*"', drawn.getvalue())
    assert box is not None
    body = (
        drawn.getvalue().partition("<defs>")[2].partition("</defs>")[2]
    )  # the page's style sheet replaces the figure's own
    body = re.sub('<g id="[^"]*"', "<g", body).replace("xlink:href", "href")
    body = re.sub('style="[^"]*"', lambda style: re.sub("#[0-9a-f]{6}", _variable, style[0]), body)
    for tag, words in (("desc", description), ("title", title)):
        body = f'<{tag} id="{key}-{tag}">{escape(printable(words).strip())}</{tag}>{body}'
    return f'<svg {box[0]} role="img" aria-labelledby="{key}-title {key}-desc">{body}'


def _variable(colour: re.Match[str]) -> str:
    name = _VARIABLES.get(colour[0])
    return f"var(--{name})" if name else colour[0]
