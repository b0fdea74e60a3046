"""Convert the quickstart, docs/quickstart.md, to the notebook docs/quickstart.ipynb.

    python scripts/make_notebook.py

Run it after every change of the quickstart; a test checks this. Shell commands become cells that start with %%bash. The
notebook's kernel must be the Python of .venv.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, NOTEBOOK = ROOT / "docs" / "quickstart.md", ROOT / "docs" / "quickstart.ipynb"
_BLOCK = re.compile(r"^(?:<!-- as: \w+ -->\n)?```(bash|python)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_START = """\
import os
from pathlib import Path

while not Path("train.py").exists():  # the repository's root
    os.chdir("..")
os.environ["PATH"] = f"{Path('.venv/bin').resolve()}:{os.environ['PATH']}\""""


def main() -> int:
    NOTEBOOK.write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(NOTEBOOK)
    return 0


def notebook(page: str) -> str:
    """The JSON of the notebook made from a Markdown page."""
    cells, at = [_cell("code", _START)], 0
    for block in _BLOCK.finditer(page):
        cells.append(_cell("markdown", page[at : block.start()]))
        source = block[2] if block[1] == "python" else f"%%bash\n{block[2]}"
        if "make install" not in source:  # the notebook already runs in the installed environment
            cells.append(_cell("code", source))
        at = block.end()
    cells.append(_cell("markdown", page[at:]))
    cells = [{**cell, "id": f"cell-{n}"} for n, cell in enumerate(cell for cell in cells if cell["source"])]
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def _cell(kind: str, source: str) -> dict[str, object]:
    lines = source.strip().splitlines(keepends=True)
    extra = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": lines, **extra}


if __name__ == "__main__":
    sys.exit(main())
