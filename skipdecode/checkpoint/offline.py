"""A single check whether the Hub can be reached; offline, transformers would retry each file for a minute."""

import http.client
import os
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from transformers.utils.hub import is_offline_mode

from skipdecode.errors import ConfigError
from skipdecode.internals import is_cached

_HUB = "https://huggingface.co"
_TIMEOUT = 5.0  # seconds


def without_network(
    name: str, files: Sequence[str] = ("config.json", "adapter_config.json"), **where: Any
) -> dict[str, Any]:
    """Arguments that restrict `from_pretrained` to the local cache where the Hub can't be reached.

    Args:
        name: a repository of the Hub, or a folder (which needs no arguments).
        files: files of which the cache contains at least one if it contains the repository.
        where: arguments of `from_pretrained` such as `cache_dir` and `revision`.

    Returns:
        `local_files_only`, or nothing where the Hub can be reached or isn't needed.

    Raises:
        ConfigError: where the Hub can't be reached and the cache doesn't contain the repository.
    """
    address = os.environ.get("HF_ENDPOINT") or _HUB
    if Path(name).is_dir() or is_offline_mode() or where.get("local_files_only") or _answers(address):
        return {}
    if not any(is_cached(name, file, **where) for file in files):
        raise ConfigError(
            f"{name!r} is not a folder, there is no copy of it in the cache, and the Hub can't be reached ({address})"
        )
    return {"local_files_only": True}


def looks_local(name: str) -> bool:
    """Whether a name is that of a folder, existing or not, rather than that of a repository of the Hub."""
    return Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") > 1


@cache
def _answers(address: str) -> bool:
    """Whether a server answers at an address, with whatever status below 500."""
    answered: list[bool] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_TIMEOUT).close()
        except urllib.error.HTTPError as error:
            if error.code >= 500:  # a proxy that can't reach the server
                return
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ssl.SSLError):  # the Hub's client may trust more certificates
                return
        except (OSError, ValueError, http.client.HTTPException):  # ValueError: an invalid address
            return
        answered.append(True)

    # In a thread, because a name lookup has no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_TIMEOUT)
    return bool(answered)
