"""Print the structure of the code: its rooms, the imports between them, circles of imports, lines.

    python scripts/import_graph.py                 # of this checkout
    python scripts/import_graph.py --root FOLDER   # of another

A room is a module of a package, or a folder in it with all that it holds. An arrow is an import between two rooms of a
package. A room stands one floor above the highest that it imports. A circle is a set of modules, of any package, that
import each other in a loop, imports within functions among them.
"""

import argparse
import ast
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import networkx

from eval.console import make_console
from eval.tables import Table

PACKAGES = ("skipdecode", "configs", "data", "eval", "train", "scripts")
Graph = dict[str, set[str]]


class Package(NamedTuple):
    """One package, or all of the code: how many rooms, floors and arrows it has, and lines of code."""

    rooms: int
    floors: int
    arrows: int
    lines: int


def modules(root: Path) -> dict[str, Path]:
    """The modules of the packages below a folder, by their dotted names."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(found: Mapping[str, Path]) -> Graph:
    """The modules that each module imports, wherever in it."""
    graph: Graph = {}
    for name, path in found.items():
        graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= inner & found.keys() or {node.module}
        graph[name] = (graph[name] & found.keys()) - {name}
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """The sets of modules that reach each other, each sorted."""
    found = networkx.strongly_connected_components(networkx.DiGraph(graph))
    return sorted(sorted(circle) for circle in found if len(circle) > 1)


def rooms(graph: Graph, package: str) -> Graph:
    """The rooms of a package and the rooms that each imports; a package's own `__init__` and `__main__` are none."""

    def room(name: str) -> str:
        return ".".join(name.split(".")[:2])

    inside = {name for name in graph if name.startswith(f"{package}.") and not name.endswith("__main__")}
    found: Graph = {room(name): set() for name in inside}
    for name in inside:
        found[room(name)] |= {room(other) for other in graph[name] & inside} - {room(name)}
    return found


def floors(graph: Graph) -> int:
    """The rooms of the longest chain of imports; those of a circle count as one."""
    chains = networkx.condensation(networkx.DiGraph(graph))
    return int(networkx.dag_longest_path_length(chains)) + 1 if graph else 0


def longest_function(found: Iterable[Path]) -> tuple[int, str]:
    """The lines of the longest function, and where it stands."""
    lengths = [
        (int(node.end_lineno or 0) - node.lineno + 1, f"{path}:{node.name}")
        for path in found
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return max(lengths)


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def describe(root: Path) -> dict[str, Package]:
    """Every package below a folder, and all of them."""
    found = modules(root)
    graph = imports(found)
    described = {}
    for package in PACKAGES:
        drawn = rooms(graph, package)
        lines = sum(count_lines(path) for name, path in found.items() if name.split(".")[0] == package)
        described[package] = Package(len(drawn), floors(drawn), sum(map(len, drawn.values())), lines)
    lines = sum(package.lines for package in described.values())
    whole = Package(len(graph), floors(graph), sum(map(len, graph.values())), lines)
    return {**described, "all, by module": whole}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="a checkout")
    root = parser.parse_args().root
    found = modules(root)
    if not found:
        parser.error(f"--root {root} holds none of {', '.join(PACKAGES)}")
    rows = [(name, *map(str, package)) for name, package in describe(root).items()]
    console = make_console()
    console.print(Table(("package", *Package._fields), rows, left=1).to_rich())
    looped = circles(imports(found))
    console.print(f"circles: {len(looped)}", *(", ".join(circle) for circle in looped), sep="\n")
    largest = max(found.values(), key=count_lines)
    console.print(f"largest file: {largest.relative_to(root)}, {count_lines(largest)} lines")
    length, where = longest_function(found.values())
    console.print(f"longest function: {Path(where).relative_to(root)}, {length} lines", soft_wrap=True)
    tests = sum(map(count_lines, (root / "tests").rglob("*.py")))
    console.print(f"tests: {tests} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
