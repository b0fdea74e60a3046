"""The layout that the design lays down."""

import ast
import graphlib
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib
from built_wheels import build_distributions

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "skipdecode": {"skipdecode"},
    "configs": {"skipdecode", "configs"},
    "data": {"skipdecode", "configs", "data"},
    "eval": {"skipdecode", "configs", "data", "eval"},
    "train": {"skipdecode", "configs", "data", "eval", "train"},
}


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_go_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        assert imported(file) & ({*ALLOWED, "scripts", "tests"}) <= ALLOWED[package], file


def imports_by_module() -> dict[str, set[str]]:
    """For each module of the project, those that it imports, also within functions."""
    names = {}
    for file in (file for package in (*ALLOWED, "scripts") for file in (ROOT / package).rglob("*.py")):
        names[".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = file
    assert len(names) > 100
    graph: dict[str, set[str]] = {}
    for name, file in names.items():
        graph[name] = set()
        for node in nodes(file):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & names.keys()
            elif isinstance(node, ast.ImportFrom):
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & names.keys()
                graph[name] |= inner or {str(node.module)} & names.keys()
    return graph


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Whichever packages they are in, imports within functions among them."""
    graphlib.TopologicalSorter(imports_by_module()).prepare()  # raises CycleError, which names the circle


def test_subpackages_of_the_library_import_each_other_in_one_direction() -> None:
    """A module at the top of the library stands for itself."""
    parts: dict[str, set[str]] = {}
    for module, imported_modules in imports_by_module().items():
        if module.startswith("skipdecode."):
            found = {name.split(".")[1] for name in imported_modules if name.startswith("skipdecode.")}
            here = module.split(".")[1]
            parts.setdefault(here, set()).update(found - {here})
    graphlib.TopologicalSorter(parts).prepare()  # raises CycleError, which names the circle
    assert {"errors", "schedule", "generate", "cli"} <= parts.keys()
    assert len(parts) <= 16, "beside the package itself"


@pytest.mark.parametrize("module", ["eval.results", "eval.tables", "eval.score.registry"])
def test_results_are_read_without_torch_and_transformers(module: str) -> None:
    code = f"import sys, {module}; print({{'torch', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_library_needs_torch_and_transformers_alone() -> None:
    library = ROOT / "skipdecode"
    files = {file.relative_to(library): imported(file) for file in library.rglob("*.py")}
    kernels = {"kernels/gpu.py", "kernels/gpu_attention.py"}
    assert {str(name) for name, names in files.items() if "triton" in names} == kernels
    used = set().union(*(names for name, names in files.items() if name.parts[0] != "serve")) - {"triton"}
    assert used - set(sys.stdlib_module_names) == {"torch", "transformers", "skipdecode"}
    extra = set().union(*(names for name, names in files.items() if name.parts[0] == "serve"))
    extra -= {"torch", "transformers", "skipdecode", *sys.stdlib_module_names}
    of_serve = {"fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn"}
    assert extra == {*of_serve, "ray", "llguidance"}  # skipdecode[serve,ray,json]
    for package, file in (("ray", "serve/ray.py"), ("llguidance", "serve/json_output.py")):
        assert [str(name) for name, names in files.items() if package in names] == [file]


def test_one_function_alone_imports_what_serves() -> None:
    files = [file for package in ALLOWED for file in (ROOT / package).rglob("*.py") if file.parent.name != "serve"]
    at = {
        (file.name, node.col_offset > 0)
        for file in files
        for node in nodes(file)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("skipdecode.serve")
    }
    assert at == {("commands.py", True)}


def private_names(file: Path) -> set[str]:
    """Names with an underscore in front that a file takes from what isn't its own, also as a text."""
    found: set[str] = set()
    for node in nodes(file):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
            found |= {part for name in names for part in name.split(".")}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
    found.discard("_exit")  # of os, which documents it
    return {name for name in found if name.startswith("_") and name.strip("_") and not name.endswith("__")}


def test_the_libraries_private_names_stand_in_one_module() -> None:
    files = {file.name: private_names(file) for file in (ROOT / "skipdecode").rglob("*.py")}
    assert "_pad_token_tensor" in files.pop("internals.py")
    assert {name: names for name, names in files.items() if names} == {}


def test_nothing_imports_scripts_and_train_py_calls_the_command_line_alone() -> None:
    assert imported(ROOT / "train.py") == {"sys", "skipdecode"}
    assert 'run_module("train.cli")' in (ROOT / "train.py").read_text(encoding="utf-8")


def test_the_wheel_holds_the_library_alone_and_is_built_from_the_source_distribution(tmp_path: Path) -> None:
    # As where there is no compiler: the kernels take a minute and are no part of what is looked at.
    source, wheel = build_distributions(tmp_path, CC="false", CXX="false")
    names = zipfile.ZipFile(wheel).namelist()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert {name.split("/")[0] for name in names} == {"skipdecode", f"skipdecode-{version}.dist-info"}
    for module in (ROOT / "skipdecode").rglob("*.py"):
        assert str(module.relative_to(ROOT)) in names
    assert "skipdecode/serve/page.html" in names
    assert "skipdecode/py.typed" in names
    with tarfile.open(source) as archive:
        sources = {f"skipdecode-{version}/skipdecode/kernels/{name}" for name in ("cpu.cpp", "cpu_isa.h")}
        assert sources <= set(archive.getnames())


def test_the_version_is_that_of_the_latest_release_in_the_changelog() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", version]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
