"""Distributions of the package, built from a copy of its files, so that nothing is left behind in the checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("skipdecode", "configs", "data", "eval", "train")


def build_distributions(folder: Path, **environment: str) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it; needs no network.

    Args:
        folder: an empty folder for the copy.
        environment: variables for the build, such as CXX.
    """
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    command = [sys.executable, "-m", "build", "--no-isolation"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=os.environ | environment)
    (source,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return source, wheel
