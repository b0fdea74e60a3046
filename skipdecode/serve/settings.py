"""The settings of a server: defaults of requests, limits, and access."""

import math
import re
from dataclasses import dataclass

from skipdecode.errors import ConfigError, check_counts
from skipdecode.schedule.schedule import Over


@dataclass(frozen=True)
class ServeSettings:
    """A server's settings.

    Args:
        name: of the model, in requests.
        speedup: default target speedup.
        over: default for which time a speedup refers to.
        strict: whether speedups that can't be reached are refused, in requests too.
        new_tokens: default maximum number of new tokens.
        max_new_tokens: largest maximum that a request may set.
        max_sequences: maximum number of sequences of a request, over its prompts and `n`.
        max_bytes: maximum size of a request's body.
        timeout: seconds after which an unfinished request gets an error.
        drain: seconds that unfinished requests may still take when the server shuts down.
        api_key: required from clients; None if no key is required.
        allow_origins: origins, such as "https://example.org", whose web pages may use the server; "*" for all.

    Raises:
        ConfigError: for values out of range.
    """

    name: str
    speedup: float = 1.0
    over: Over | None = None
    strict: bool = False
    new_tokens: int = 64
    max_new_tokens: int = 1024
    max_sequences: int = 64
    max_bytes: int = 2**20
    timeout: float = 300.0
    drain: float = 30.0
    api_key: str | None = None
    allow_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = ("new_tokens", "max_new_tokens", "max_sequences", "max_bytes")
        check_counts(**{name: getattr(self, name) for name in names})
        if self.new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"new_tokens is {self.new_tokens}: it must be at most max_new_tokens, {self.max_new_tokens}"
            )
        for name in ("timeout", "drain"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be a number of seconds above 0")
        if self.api_key is not None and not self.api_key:
            raise ConfigError("the API key is empty: give one, or leave it out")
        for origin in self.allow_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#@*]+", origin):
                raise ConfigError(
                    f"--allow-origin is {origin!r}: it must be * or an origin as browsers send it, in lower case and "
                    "without a path, such as https://example.org or http://localhost:3000"
                )
