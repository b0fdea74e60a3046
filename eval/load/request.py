"""The request for a load test."""

import math
from dataclasses import dataclass
from pathlib import Path

from eval.output import check_benchmark_output
from skipdecode.errors import ConfigError
from skipdecode.kernels.linear import Weights

MAX_COUNT = 1_000_000  # of requests, rounds, tokens and sequences
DEFAULT_RATES = (5.0, 10.0, 20.0, math.inf)
STANDALONE = "standalone"
TRANSFORMERS = "transformers"
STATIC_BATCHING = "lock-step-"  # the prefix of system names


def speed_of(system: str) -> float | None:
    """The speed in the name of a system, such as 3 for `3x` and `lock-step-3x`; None for other names.

    >>> speed_of("1.5x"), speed_of("lock-step-3x"), speed_of("lossless")
    (1.5, 3.0, None)
    """
    number = system.removeprefix(STATIC_BATCHING)
    try:
        return float(number.removesuffix("x")) if number.endswith("x") else None
    except ValueError:
        return None


@dataclass(frozen=True)
class LoadRequest:
    """The options of `python -m eval.load`.

    Raises ConfigError for values out of range, and for an output that already exists and isn't unfinished.
    """

    output: Path
    checkpoint: str | None = None
    url: str | None = None
    model: str | None = None
    strict: bool = False  # fail on a speed that can't be reached
    systems: tuple[str, ...] = ()  # empty: 1x, 2x and 3x of a checkpoint; the default of the server at an address
    standalone: str | None = None
    rates: tuple[float, ...] = DEFAULT_RATES  # requests per second; infinite: all at once
    requests: int = 100  # per system, rate and round
    rounds: int = 3
    task: str | None = None
    data_dir: str | None = None
    task_options: tuple[str, ...] = ()  # key=value
    max_new_tokens: int | None = None
    rows: int = 32  # maximum batch size of a server started here
    wave_rows: int = 1
    wave_seconds: float = 0.05
    weights: Weights | None = None
    dtype: str | None = None
    timeout: float = 120.0
    stream: bool = True  # whether answers are requested as streams
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (self.url is None):
            raise ConfigError("give either a --checkpoint to serve or the --url of a running server")
        counts = {"--requests": self.requests, "--rounds": self.rounds, "--rows": self.rows}
        counts |= {
            "--max-new-tokens": 1 if self.max_new_tokens is None else self.max_new_tokens,
            "--wave-rows": self.wave_rows,
        }
        for name, number in counts.items():
            if not 1 <= number <= MAX_COUNT:
                raise ConfigError(f"{name} is {number}: it must lie between 1 and {MAX_COUNT}")
        if not all(rate > 0 for rate in self.rates):  # also refuses NaN
            raise ConfigError(f"--rate is {list(self.rates)}: rates must be above 0 requests per second, or inf")
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"--timeout is {self.timeout}: it must be a number of seconds above 0")
        self._check_systems()
        for name, values in {"--rate": self.rates, "--system": self.systems}.items():
            if len(set(values)) != len(values):
                raise ConfigError(f"{name} is {list(values)}: name each once")
        check_benchmark_output(self.output)

    def _check_systems(self) -> None:
        systems = self.systems
        if self.url is not None:
            for name in ("standalone", "weights", "dtype", "rows", "wave_rows", "wave_seconds"):
                if getattr(self, name) != getattr(LoadRequest, name):  # its default
                    option = f"--{name.replace('_', '-')}"
                    raise ConfigError(f"{option} is for a server that is started here: leave it out with --url")
            systems = systems or ("served",)
        elif self.model is not None:
            raise ConfigError("--model selects a model of the server at --url: leave it out with --checkpoint")
        else:
            systems = systems or ("1x", "2x", "3x", *([STANDALONE] if self.standalone is not None else []))
        known = ("served", "lossless") if self.url is not None else ("lossless", TRANSFORMERS, STANDALONE)
        for system in systems:
            speed = speed_of(system)
            valid = system in known if speed is None else 1 <= speed < math.inf
            if not valid or (self.url is not None and system.startswith(STATIC_BATCHING)):
                what = "3x" if self.url is not None else "3x, lock-step-3x"
                raise ConfigError(f"--system is {system!r}: name a speed such as {what}, or one of {', '.join(known)}")
        if (STANDALONE in systems) != (self.standalone is not None):
            raise ConfigError("--system standalone requires --standalone DIR, the exported folder, and vice versa")
        object.__setattr__(self, "systems", systems)
