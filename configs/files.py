"""Finding configuration files by name, and reading YAML."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from skipdecode.errors import ConfigError, first_line, unknown

# What OmegaConf raises for invalid YAML: its own errors, the parser's, ValueError for huge integers and bytes that
# aren't UTF-8, and RecursionError for deep nesting.
YAML_ERRORS = (OmegaConfBaseException, YAMLError, ValueError, RecursionError)
ROOT = Path(__file__).resolve().parent.parent


def named_file(name: str, folder: Path, suffix: str, kind: str) -> Path:
    """Find a file by its name in a folder, or by its path. Raises ConfigError that names the nearest known name."""
    try:
        for path in (folder / f"{name}{suffix}", Path(name)):
            if path.is_file():
                return path
    except OSError as error:  # such as a file name that is too long
        raise ConfigError(f"{kind} {name!r}: no such file ({error.strerror})") from error
    if name.endswith(suffix) or "/" in name:
        raise ConfigError(f"{kind} {name!r}: no such file")
    raise unknown(kind, name, [path.stem for path in folder.glob(f"*{suffix}")])


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file. Raises ConfigError for one that can't be read or doesn't hold a mapping."""
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except (*YAML_ERRORS, OSError) as error:
        raise ConfigError(f"{path} can't be read: {first_line(error)}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path} must hold a mapping of keys to values")
    return {str(key): value for key, value in values.items()}


def from_dotlist(pairs: Sequence[str]) -> Any:
    """Values of `section.key=value` words, as `OmegaConf.from_dotlist`, to which the rest behind a # is a comment.

    Here it isn't, as a shell has no comments within a word.

    >>> from_dotlist(["task.answer_after=####", "task.holdout=3"])
    {'task': {'answer_after': '####', 'holdout': 3}}
    """
    return OmegaConf.from_dotlist([_quoted(pair) for pair in pairs])


def _quoted(pair: str) -> str:
    key, _, value = pair.partition("=")
    return f"{key}={json.dumps(value)}" if "#" in value and value[0] not in "\"'[{" else pair
