"""This package as one file that a checkpoint carries, for `generate(custom_generate=REPOSITORY)` of transformers.

transformers loads `custom_generate/generate.py` of a repository with `trust_remote_code=True` and calls its `generate`.
That file is written here, from the modules of this package as they are: the order is that of their imports, imports
among them are left out, and all others stand at the top. It needs torch and transformers and nothing else.
"""

import ast
import os
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from skipdecode.files import write_atomically

PATH = Path("custom_generate", "generate.py")  # in a checkpoint
_PACKAGE = __name__.partition(".")[0]
_ENTRY = "generate.remote_entry"  # the module whose `generate` transformers calls
_HEAD = '''"""Decoding with layers skipped (SkipDecode, arXiv 2307.02628), for transformers' `custom_generate`.

    model = AutoModelForCausalLM.from_pretrained(REPOSITORY)
    model.generate(**inputs, custom_generate=REPOSITORY, trust_remote_code=True, speedup=3)

Written from the modules of the package skipdecode {version}, which say what they do; don't edit it here. It needs
torch and transformers. Apache-2.0.
"""
'''


def write_custom_generate(folder: str | os.PathLike[str]) -> Path:
    """Write `custom_generate/generate.py` into a checkpoint's folder, whole or not at all. Returns its path."""
    path = Path(folder) / PATH
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, custom_generate_source())
    return path


@cache
def custom_generate_source() -> str:
    """The text of the file. Raises ValueError where two modules define the same name, which one file can't hold."""
    sources = _modules(_ENTRY)
    defined: dict[str, str] = {}
    imports: dict[str, set[str]] = {}
    bodies = []
    for name, source in sources.items():
        tree = ast.parse(source)
        for defines in _definitions(tree):
            if defines in defined:
                raise ValueError(f"{defines} is defined in {defined[defines]} and in {name}: rename one of them")
            defined[defines] = name
        kept = source.splitlines()
        for node in tree.body:
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            if not _own(node):
                for start, names in _parts(node):
                    imports.setdefault(start, set()).update(names)
            kept[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)  # type: ignore[operator]
        if ast.get_docstring(tree) is not None:
            end = tree.body[0].end_lineno
            kept[:end] = ["" for _ in kept[:end]]
            doc = [f"# {line}".rstrip() for line in str(ast.get_docstring(tree)).splitlines()]
        else:
            doc = []
        rule = f"# ---- {_PACKAGE}.{name} "
        bodies.append("\n".join([f"{rule:-<120}", *doc, "", "", *"\n".join(kept).strip("\n").splitlines()]))
    lines = [f"{start}{', '.join(sorted(imports[start]))}" for start in sorted(imports, key=_import_order)]
    head = _HEAD.format(version=_version())
    return "\n\n\n".join([head + "\n" + "\n".join(lines), *bodies]) + "\n"


def _version() -> str:
    try:
        return version(_PACKAGE)
    except PackageNotFoundError:  # a checkout that runs where nothing was installed
        return "of a checkout"


def _modules(entry: str) -> dict[str, str]:
    """The sources of a module and of all that it imports from this package, each after what it imports."""
    found: dict[str, str] = {}

    def visit(name: str) -> None:
        if name in found:
            return
        path = import_module(f"{_PACKAGE}.{name}").__file__
        source = Path(str(path)).read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.ImportFrom) and _own(node):
                visit(str(node.module).partition(".")[2])
        found[name] = source

    visit(entry)
    return found


def _own(node: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == _PACKAGE


def _parts(node: ast.Import | ast.ImportFrom) -> list[tuple[str, list[str]]]:
    """The starts of an import's lines and what follows them, to be joined with those of other modules."""
    names = [f"{name.name} as {name.asname}" if name.asname else name.name for name in node.names]
    if isinstance(node, ast.Import):
        return [(f"import {name}", [""]) for name in names]
    return [(f"from {node.module} import ", names)]


def _import_order(start: str) -> tuple[bool, bool, str]:
    module = start.split()[1].split(".")[0]
    return module in ("torch", "transformers"), start.startswith("from "), start


def _definitions(tree: ast.Module) -> list[str]:
    """The names that a module defines at its top level."""
    names = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return names
