"""Files that names mean, and YAML."""

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
