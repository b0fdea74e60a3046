"""The structure of the code: no circles of imports, and results that are read without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import import_graph

ROOT = Path(__file__).resolve().parents[2]


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = import_graph.modules(ROOT)
    assert len(found) > 100
    assert import_graph.circles(import_graph.imports(found)) == []


def test_the_figures_of_a_made_up_house_are_those_counted_by_hand(tmp_path: Path) -> None:
    files = {
        "eval/__init__.py": "",
        "eval/top.py": "from eval.room.a import x\nfrom eval import middle\nimport os\n",
        "eval/middle.py": "import eval.ground\n",
        "eval/ground.py": "x = 1\n\n",
        "eval/room/a.py": "def x():\n    from eval.room import b\n    return b\n",
        "eval/room/b.py": "from eval.room.a import x\nfrom eval.ground import x as y\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    # top, middle, ground and room; top -> room, top -> middle, middle -> ground, room -> ground
    described = import_graph.describe(tmp_path)["eval"]
    assert described == import_graph.Package(rooms=4, floors=3, arrows=4, lines=11)
    graph = import_graph.imports(import_graph.modules(tmp_path))
    assert import_graph.circles(graph) == [["eval.room.a", "eval.room.b"]]


@pytest.mark.parametrize("module", ["eval.results", "eval.tables", "eval.score.registry"])
def test_results_are_read_without_torch_and_transformers(module: str) -> None:
    code = f"import sys, {module}; print({{'torch', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
