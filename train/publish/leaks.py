"""What must not be published with a checkpoint: secrets are detected, and local paths are made relative."""

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
from detect_secrets.plugins.base import RegexBasedDetector

# Detectors of detect-secrets that aren't used: vocabularies are full of random-looking words, and versions look like
# IPs.
_UNUSED = ("Base64HighEntropyString", "HexHighEntropyString", "IPPublicDetector")
# Patterns that detect-secrets lacks, or has only in older forms.
_OWN = {
    "a token of the Hub": re.compile(r"\bhf_[A-Za-z0-9]{30,}"),
    "a key of Weights & Biases": re.compile(
        r"(?<![0-9A-Za-z])(?<!/snapshots/)[0-9a-f]{40}(?![0-9A-Za-z])|\bwandb_v\d+_\w{20,}"
    ),
    "a key of OpenAI or Anthropic": re.compile(r"\bsk-(?=[\w-]*\d)[\w-]{20,}"),
    "a token of GitHub": re.compile(r"\b(?:github_pat_\w{20,}|gh[a-z]_[A-Za-z0-9]{30,})"),
    "a token of GitLab": re.compile(r"\bgl[a-z]{2,4}-(?=[\w-]*\d)[\w-]{20,}"),
    "a token of Slack": re.compile(r"\bxox[a-z]-(?=[\w-]*\d)[\w-]{10,}"),
    "a key of Google": re.compile(r"\bAIza[\w-]{30,}"),
}
_PATH = re.compile(r"(?<![\w.:/\\<~-])~?/[^\s\"'`,;:()\[\]{}<>|]+/[^\s\"'`,;:()\[\]{}<>|]*")
_PUBLIC = ("bin", "dev", "etc", "lib", "proc", "sys", "usr")  # the same on every machine
_PRIVATE = ("home", "Users", "root", "tmp", "mnt", "media", "data", "scratch", "workspace", "Volumes")


def find_secret(text: str, name: str | None = None) -> str | None:
    """The kind of secret that a text seems to contain, or None. Nothing is sent over the network.

    Args:
        text: contents of a file.
        name: the file's name; with it, assignments to words such as password are detected too, in the file's syntax.
    """
    for kind, pattern in _OWN.items():
        if pattern.search(text):
            return kind
    for plugin in _plugins():
        if isinstance(plugin, RegexBasedDetector):
            if any(plugin.analyze_string(text)):
                return f"a secret ({plugin.secret_type})"
        elif name is not None and any(plugin.analyze_line(name, line) for line in text.splitlines()):
            return f"a secret ({plugin.secret_type})"
    return None


@cache
def _plugins() -> tuple[Any, ...]:
    kinds: Any = get_mapping_from_secret_type_to_class().values()
    return tuple(kind() for kind in kinds if kind.__name__ not in _UNUSED)


def find_path(text: str) -> str | None:
    """The first local absolute path in a text; None where there is none."""
    return next((found[0] for found in _PATH.finditer(text) if _is_private(found[0])), None)


def without_paths(value: Any) -> Any:
    """Plain values in which local paths are relative to the working directory, or outside of it reduced to the name."""
    if isinstance(value, dict):
        return {without_paths(key): without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    if "\n" not in value and _is_private(value):  # the value is a path, which may contain blanks
        return _shortened(value)
    return _PATH.sub(lambda found: _shortened(found[0]) if _is_private(found[0]) else found[0], value)


def _is_private(path: str) -> bool:
    if path.startswith("~/"):
        return True
    first, slash, _ = path.removeprefix("/").partition("/")
    known = first in _PRIVATE or (first not in _PUBLIC and Path("/", first).exists())
    return path.startswith("/") and bool(first and slash) and known


def _shortened(path: str) -> str:
    full = Path(path).expanduser()
    return os.path.relpath(full) if full.is_relative_to(Path.cwd()) else full.name
