"""The settings of a server: defaults of requests, limits, and access."""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from skipdecode.errors import ConfigError, check_counts
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.schedule import Over

API_KEY = "SKIPDECODE_API_KEY"  # environment variable with the key


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


@dataclass(frozen=True)
class ServerOptions:
    """The options of `skipdecode serve` by their names, but for the address; its help says what each one means.

    An application for Ray Serve takes them as arguments.
    """

    checkpoint: str
    gguf_file: str | None = None
    device: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    weights: Weights | None = None
    speedup: float = 1.0
    over: Over | None = None
    strict: bool = False
    name: str | None = None
    api_key: str | None = None
    allow_origin: tuple[str, ...] = ()
    rows: int = 32
    queue: int = 256
    cache_gb: float | None = None
    prefix_mib: float = 512
    wave_tokens: int = 256
    wave_rows: int = 1
    wave_seconds: float = 0.05
    max_new_tokens: int = 64
    max_new_tokens_limit: int = 1024
    timeout: float = 300.0
    drain: float = 30.0
    replicas: int | None = None
    threads: int | None = None

    def settings(self) -> ServeSettings:
        """The settings of the web application. Raises ConfigError for values out of range."""
        return ServeSettings(
            name=self.name or Path(os.path.abspath(self.checkpoint)).name,  # also for "."
            speedup=self.speedup,
            over=self.over,
            strict=self.strict,
            new_tokens=min(self.max_new_tokens, self.max_new_tokens_limit),
            max_new_tokens=self.max_new_tokens_limit,
            timeout=self.timeout,
            drain=self.drain,
            api_key=self.api_key if self.api_key is not None else os.environ.get(API_KEY),
            allow_origins=tuple(self.allow_origin),
        )
