"""Reaching the Hub, tried once: without a network, each file that is asked for would be tried for a minute."""

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
_PATIENCE = 5.0  # seconds


def without_network(
    name: str, files: Sequence[str] = ("config.json", "adapter_config.json"), **where: Any
) -> dict[str, Any]:
    """Arguments that keep `from_pretrained` to the cache, where a name is a repository and the Hub doesn't answer.

    Args:
        name: of a model, or its folder.
        files: of which the cache holds one where it holds the model.
        where: such as `cache_dir` and `revision`, as in `from_pretrained`.

    Raises:
        ConfigError: where the Hub doesn't answer and the cache doesn't hold it.
    """
    address = os.environ.get("HF_ENDPOINT") or _HUB
    if Path(name).is_dir() or is_offline_mode() or where.get("local_files_only") or _answers(address):
        return {}
    if not any(is_cached(name, file, **where) for file in files):
        raise ConfigError(
            f"{name!r} is no folder, there is no copy of it in the cache, and the Hub can't be reached ({address})"
        )
    return {"local_files_only": True}


def looks_local(name: str) -> bool:
    """True for the name of a folder, also of one that isn't there, rather than of a repository of the Hub."""
    return Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") > 1


@cache
def _answers(address: str) -> bool:
    """True where anything answers at an address, whatever it says."""
    answered: list[bool] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_PATIENCE).close()
        except urllib.error.HTTPError as error:  # an answer, unless it is a proxy's that reaches nobody
            if error.code >= 500:
                return
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ssl.SSLError):  # others may trust certificates that Python doesn't
                return
        except (OSError, ValueError, http.client.HTTPException):  # ValueError: no address, as of one without https://
            return
        answered.append(True)

    # In a thread, since looking up a name has no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return bool(answered)
