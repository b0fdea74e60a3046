"""What a server is told: addresses, limits and the speed that requests have where they name none."""

import math
import re
from dataclasses import dataclass

from skipdecode.errors import ConfigError, check_counts
from skipdecode.schedule.schedule import Over


@dataclass(frozen=True)
class ServeSettings:
    """A server's settings.

    Args:
        name: of the model, as requests say it.
        speedup, over: of requests that name none.
        strict: whether speedups that can't be reached are refused, those of requests too.
        new_tokens: of requests that don't say how many.
        most_new_tokens: that a text may have.
        most_texts: of a request, over its prompts and `n`.
        most_bytes: of a request's body.
        timeout: seconds after which a request is given up.
        drain: seconds that requests may still take when the server is told to end.
        api_key: that requests must show; None for none.
        allow_origins: the origins, such as "https://example.org", whose pages may ask from a browser; "*" for all.

    Raises:
        ConfigError: for numbers out of range.
    """

    name: str
    speedup: float = 1.0
    over: Over | None = None
    strict: bool = False
    new_tokens: int = 64
    most_new_tokens: int = 1024
    most_texts: int = 64
    most_bytes: int = 2**20
    timeout: float = 300.0
    drain: float = 30.0
    api_key: str | None = None
    allow_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = ("new_tokens", "most_new_tokens", "most_texts", "most_bytes")
        check_counts(**{name: getattr(self, name) for name in names})
        if self.new_tokens > self.most_new_tokens:
            raise ConfigError(
                f"new_tokens is {self.new_tokens}: it must be at most most_new_tokens ({self.most_new_tokens})"
            )
        for name in ("timeout", "drain"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be a number of seconds above 0")
        if self.api_key is not None and not self.api_key:
            raise ConfigError("the API key is empty: name one, or leave it out")
        for origin in self.allow_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#@*]+", origin):
                raise ConfigError(
                    f"--allow-origin is {origin!r}: it must be * or an origin as browsers send it, in lower case and "
                    "without a path, such as https://example.org or http://localhost:3000"
                )
