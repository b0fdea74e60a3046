"""Public names of a package that are imported when they are first used."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` for a package's `__init__.py` (PEP 562).

    Args:
        package: the package's `__name__`.
        homes: for each public name, the module within the package that defines it.

    `__getattr__` raises AttributeError for other names.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names
