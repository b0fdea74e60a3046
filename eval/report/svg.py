"""A matplotlib figure as SVG that can stand inside a page, many of them, in a light and in a dark scheme."""

import re
from io import StringIO
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from eval.drawing import EMPTY, INK, MUTED, RULE, SERIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that the page's style sheet replaces: it has a light and a dark value of each.
_VARIABLES = {INK: "ink", MUTED: "muted", RULE: "rule", EMPTY: "empty"}
_VARIABLES |= {colour.lower(): f"series-{number}" for number, (colour, _) in enumerate(SERIES)}

_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"


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
    figure.savefig(drawn, format="svg", transparent=True, metadata=nothing)
    root = ElementTree.fromstring(drawn.getvalue())
    for parent in root.iter():
        for child in [*parent]:
            if child.tag.endswith(("metadata", "style")):  # the style sheet holds what matplotlib's own says
                parent.remove(child)
    text = ElementTree.tostring(root, encoding="unicode")
    referred = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        if _LINK in element.attrib:
            element.set("href", f"#{key}-{element.attrib.pop(_LINK).removeprefix('#')}")
        if "id" in element.attrib:
            own = element.attrib.pop("id")
            if own in referred:
                element.set("id", f"{key}-{own}")
        if "clip-path" in element.attrib:
            element.set("clip-path", element.attrib["clip-path"].replace("url(#", f"url(#{key}-"))
        if "style" in element.attrib:
            element.set("style", re.sub("#[0-9a-f]{6}", _variable, element.attrib["style"]))
    names = {"title": title, "desc": description}
    for place, (tag, words) in enumerate(names.items()):
        named = ElementTree.Element(tag, {"id": f"{key}-{tag}"})
        named.text = printable(words).strip()
        root.insert(place, named)
    box = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib.update({"viewBox": box, "role": "img", "aria-labelledby": f"{key}-title {key}-desc"})
    return ElementTree.tostring(root, encoding="unicode")


def _variable(colour: re.Match[str]) -> str:
    name = _VARIABLES.get(colour[0])
    return f"var(--{name})" if name else colour[0]
