"""Files that names mean, read and written."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from skipdecode.errors import ConfigError, first_line, unknown

# What OmegaConf raises for a text that can't be used: its own, the parser's, that of an integer without end or of bytes
# that aren't UTF-8 (ValueError), that of nesting without end.
YAML_ERRORS = (OmegaConfBaseException, YAMLError, ValueError, RecursionError)
ROOT = Path(__file__).resolve().parent.parent


def named_file(name: str, folder: Path, suffix: str, kind: str) -> Path:
    """The file that a name in a folder, or a path, means. Raises ConfigError with the nearest name."""
    try:
        for path in (folder / f"{name}{suffix}", Path(name)):
            if path.is_file():
                return path
    except OSError as error:  # such as a name that is too long for a file's
        raise ConfigError(f"{kind} {name!r}: no such file ({error.strerror})") from error
    if name.endswith(suffix) or "/" in name:
        raise ConfigError(f"{kind} {name!r}: no such file")
    raise unknown(kind, name, [path.stem for path in folder.glob(f"*{suffix}")])


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping. Raises ConfigError where it doesn't."""
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except (*YAML_ERRORS, OSError) as error:
        raise ConfigError(f"{path} can't be read: {first_line(error)}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path} must hold a mapping of keys to values")
    return {str(key): value for key, value in values.items()}


def check_writable(path: Path) -> None:
    """Raises ConfigError where a file can't be written: a command should know before its work and not after it."""
    folder = path.resolve().parent
    while not folder.exists():
        folder = folder.parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that it is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
    except OSError as error:  # which names no file where the disk is full
        raise OSError(error.errno, error.strerror, str(path)) from error
    os.replace(partial, path)


def check_new_files(field: str, *paths: Path) -> None:
    """Raises ConfigError where a file is there already, or can't be written."""
    for path in paths:
        if path.exists():
            raise ConfigError(f"{field}: {path} is there already: name another file")
        check_writable(path)


def missing_folders(folder: Path) -> list[Path]:
    """A folder and those above it, as far as they aren't there, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: list[Path]) -> None:
    """Remove folders, the innermost first, as far as nothing is in them."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
