"""Task options from a command line."""

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from configs.files import YAML_ERRORS, from_dotlist
from skipdecode.errors import ConfigError, first_line


def task_options_of(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse the arguments of `--task-option KEY=VALUE`. Raises ConfigError for invalid ones."""
    for pair in pairs:
        if not all(part.strip() for part in pair.partition("=")):
            raise ConfigError(f"--task-option {pair!r}: expected key=value, such as holdout=60")
    try:
        changes = OmegaConf.to_container(from_dotlist(pairs))
    except YAML_ERRORS as error:
        raise ConfigError(f"--task-option {' '.join(pairs)}: {first_line(error)}") from error
    assert isinstance(changes, dict)
    if "path" in changes:
        raise ConfigError("--task-option path: set the folder of the task's files with --data-dir")
    return {str(key): value for key, value in changes.items()}
