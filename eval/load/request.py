"""The request for a benchmark under load."""

import math
from dataclasses import dataclass
from pathlib import Path

from eval.output import check_benchmark_output
from skipdecode.errors import ConfigError
from skipdecode.kernels.linear import Weights

LARGEST = 1_000_000  # of requests, rounds, tokens and rows
DEFAULT_RATES = (5.0, 10.0, 20.0, math.inf)
STANDALONE = "standalone"
TRANSFORMERS = "transformers"
LOCK_STEP = "lock-step-"


def speed_of(system: str) -> float | None:
    """The speed that a system's name says, such as 3 of `3x` and of `lock-step-3x`; None where it says none.

    >>> speed_of("1.5x"), speed_of("lock-step-3x"), speed_of("lossless")
    (1.5, 3.0, None)
    """
    number = system.removeprefix(LOCK_STEP)
    try:
        return float(number.removesuffix("x")) if number.endswith("x") else None
    except ValueError:
        return None


@dataclass(frozen=True)
class LoadRequest:
    """A benchmark, as the options of `python -m eval.load` ask for it.

    Raises ConfigError for values out of range, and for an output that is there already and isn't unfinished.
    """

    output: Path
    checkpoint: str | None = None
    url: str | None = None
    model: str | None = None
    strict: bool = False  # whether a speed that can't be reached is refused
    systems: tuple[str, ...] = ()  # none: of a checkpoint 1x, 2x and 3x; of an address what it does by itself
    standalone: str | None = None
    rates: tuple[float, ...] = DEFAULT_RATES  # requests a second; infinite: all at once
    requests: int = 100  # of a turn
    rounds: int = 3
    task: str | None = None
    data_dir: str | None = None
    task_options: tuple[str, ...] = ()  # key=value
    max_new_tokens: int | None = None
    rows: int = 32  # that a server started here decodes at once
    wave_rows: int = 1
    wave_seconds: float = 0.05
    weights: Weights | None = None
    dtype: str | None = None
    timeout: float = 120.0
    whole: bool = False  # whether answers are asked for in one piece
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (self.url is None):
            raise ConfigError("name a --checkpoint to serve, or the --url of a server that runs; one of them")
        counts = {"--requests": self.requests, "--rounds": self.rounds, "--rows": self.rows}
        counts |= {
            "--max-new-tokens": 1 if self.max_new_tokens is None else self.max_new_tokens,
            "--wave-rows": self.wave_rows,
        }
        for name, number in counts.items():
            if not 1 <= number <= LARGEST:
                raise ConfigError(f"{name} is {number}: it must lie between 1 and {LARGEST}")
        if not all(rate > 0 for rate in self.rates):  # not NaN either
            raise ConfigError(f"--rate is {list(self.rates)}: name requests a second above 0, or inf")
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
                    raise ConfigError(f"{option} is of a server that is started here: leave it out with --url")
            systems = systems or ("served",)
        elif self.model is not None:
            raise ConfigError("--model names what the server at a --url serves: leave it out with --checkpoint")
        else:
            systems = systems or ("1x", "2x", "3x", *([STANDALONE] if self.standalone is not None else []))
        known = ("served", "lossless") if self.url is not None else ("lossless", TRANSFORMERS, STANDALONE)
        for system in systems:
            speed = speed_of(system)
            good = system in known if speed is None else 1 <= speed < math.inf
            if not good or (self.url is not None and system.startswith(LOCK_STEP)):
                what = "3x" if self.url is not None else "3x, lock-step-3x"
                raise ConfigError(f"--system is {system!r}: name a speed such as {what}, or one of {', '.join(known)}")
        if (STANDALONE in systems) != (self.standalone is not None):
            raise ConfigError("--system standalone and --standalone DIR, the folder of the export, go together")
        object.__setattr__(self, "systems", systems)
