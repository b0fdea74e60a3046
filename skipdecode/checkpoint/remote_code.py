"""The modules of this package that a checkpoint carries, for `generate(custom_generate=REPOSITORY)` of transformers.

transformers loads `custom_generate/generate.py` of a repository with `trust_remote_code=True` and calls its `generate`.
It copies that file and, found by regular expressions, the files beside it that they import by `from .name import`: all
in one folder, so `skipdecode.a.b` is the file `a_b.py` there. The code needs torch and transformers and nothing else.
"""

import ast
import os
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from skipdecode.files import atomic_folder_replacement

FOLDER = Path("custom_generate")  # in a checkpoint
_PACKAGE = __name__.partition(".")[0]
_SOURCES = Path(__file__).parents[__name__.count(".")]  # the folder that the package is in
_ENTRY = f"{_PACKAGE}.generate.remote_entry"  # the module whose `generate` transformers calls
_ENTRY_TEXT = '''"""Decoding with layers skipped (SkipDecode, arXiv 2307.02628), for transformers' `custom_generate`.

    model = AutoModelForCausalLM.from_pretrained(REPOSITORY)
    model.generate(**inputs, custom_generate=REPOSITORY, trust_remote_code=True, speedup=3)

The files here are modules of the package skipdecode {version}; don't edit them here. They need torch and transformers.
Apache-2.0.
"""

from typing import TYPE_CHECKING

from .{entry} import generate

if TYPE_CHECKING:  # never imported here: transformers copies the modules that this file names
{names}
'''


def write_custom_generate(folder: str | os.PathLike[str]) -> Path:
    """Write `custom_generate/` into a checkpoint's folder, in place of one that is there. Returns its path."""
    path = Path(folder) / FOLDER
    with atomic_folder_replacement(path) as partial:
        for name, text in custom_generate_files().items():
            (partial / name).write_text(text, encoding="utf-8")
    return path


@cache
def custom_generate_files() -> dict[str, str]:
    """The names and texts of the files.

    Raises ValueError for two modules whose file would have one name, and for an import that no file can stand for.
    """
    modules = _modules(_ENTRY)
    names = "\n".join(f"    from .{_file_name(module)} import *" for module in sorted(modules))
    text = _ENTRY_TEXT.format(version=_version(), entry=_file_name(_ENTRY), names=names)
    files = {"generate.py": text}
    for module, source in modules.items():
        name = f"{_file_name(module)}.py"
        if name in files:
            raise ValueError(f"{module} would be a second {name}: rename it")
        files[name] = _with_relative_imports(source)
    return files


def _modules(entry: str) -> dict[str, str]:
    """The sources of a module and of all that it imports from this package, by their dotted names."""
    found: dict[str, str] = {}

    def visit(module: str) -> None:
        if module in found:
            return
        path = _path(module)
        if path is None or module == _PACKAGE:
            raise ValueError(f"an import from {module} can't be carried: name the module that defines it")
        found[module] = path.read_text(encoding="utf-8")
        for node in _own_imports(ast.parse(found[module])):
            for name in node.names:
                visit(_imported_module(node, name))

    visit(entry)
    return found


def _path(module: str) -> Path | None:
    path = _SOURCES.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _own_imports(tree: ast.Module) -> Iterator[ast.ImportFrom]:
    """The imports from this package, within functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == _PACKAGE:
            yield node
        elif isinstance(node, ast.Import) and any(name.name.split(".")[0] == _PACKAGE for name in node.names):
            raise ValueError(f"{ast.unparse(node)} can't be carried: write from ... import ...")


def _imported_module(node: ast.ImportFrom, name: ast.alias) -> str:
    """The module that a name is imported from, or is itself."""
    inner = f"{node.module}.{name.name}"
    return inner if _path(inner) else str(node.module)


def _file_name(module: str) -> str:
    return module.removeprefix(f"{_PACKAGE}.").replace(".", "_")


def _with_relative_imports(source: str) -> str:
    """A module's source with its imports from this package made imports of the files beside it."""
    lines = source.splitlines()
    for node in sorted(_own_imports(ast.parse(source)), key=lambda node: node.lineno, reverse=True):
        imports = []
        for name in node.names:
            module = _imported_module(node, name)
            if module == node.module:
                imports.append((_file_name(module), name))
            else:
                imports.append(("", ast.alias(_file_name(module), name.asname or name.name)))
        starts = dict.fromkeys(start for start, _ in imports)
        indent = lines[node.lineno - 1][: node.col_offset]
        lines[node.lineno - 1 : node.end_lineno] = [
            indent + ast.unparse(ast.ImportFrom(start or None, [name for begun, name in imports if begun == start], 1))
            for start in starts
        ]
    return "\n".join(lines) + "\n"


def _version() -> str:
    try:
        return version(_PACKAGE)
    except PackageNotFoundError:  # a checkout that runs where nothing was installed
        return "of a checkout"
