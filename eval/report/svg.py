"""A matplotlib figure as SVG that can stand inside a page, many of them, in a light and in a dark scheme."""

import re
from html import escape
from io import StringIO
from typing import TYPE_CHECKING

import matplotlib

from eval.drawing import EMPTY, INK, MUTED, RULE, SERIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that the page's style sheet replaces: it has a light and a dark value of each.
_VARIABLES = {INK: "ink", MUTED: "muted", RULE: "rule", EMPTY: "empty"}
_VARIABLES |= {colour.lower(): f"series-{number}" for number, (colour, _) in enumerate(SERIES)}


def printable(text: str) -> str:
    """Text that XML can hold and that a legend shows whatever it starts with."""
    return " " + "".join(character if character.isprintable() else "\ufffd" for character in text)


def to_svg(figure: "Figure", key: str, title: str, description: str) -> str:
    """The `svg` element of a figure, without a background.

    Args:
        figure: drawn in the colours above.
        key: sets its ids apart from other figures' in the page.
        title: what it is; screen readers read it out.
        description: what it shows, in words and numbers.
    """
    drawn = StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": key}):  # the ids that are referred to are hashes with it
        figure.savefig(drawn, format="svg", transparent=True, metadata=nothing)
    box = re.search('viewBox="[^"]*"', drawn.getvalue())
    assert box is not None
    body = drawn.getvalue().partition("<defs>")[2].partition("</defs>")[2]  # the style sheet says what its own says
    body = re.sub('<g id="[^"]*"', "<g", body).replace("xlink:href", "href")
    body = re.sub('style="[^"]*"', lambda style: re.sub("#[0-9a-f]{6}", _variable, style[0]), body)
    for tag, words in (("desc", description), ("title", title)):
        body = f'<{tag} id="{key}-{tag}">{escape(printable(words).strip())}</{tag}>{body}'
    return f'<svg {box[0]} role="img" aria-labelledby="{key}-title {key}-desc">{body}'


def _variable(colour: re.Match[str]) -> str:
    name = _VARIABLES.get(colour[0])
    return f"var(--{name})" if name else colour[0]
