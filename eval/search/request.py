"""The request for a search."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.request import check_new_tokens
from eval.score.tokenizers import check_tokenizer
from eval.search.paired import METRICS
from skipdecode import ConfigError
from skipdecode.errors import unknown
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.schedule import Decay, Placement

MAX_TRIALS = 10_000


@dataclass(frozen=True)
class SearchRequest:
    """The options of `python -m eval.search`; the budget is one of `speedup` and `mean_layers`.

    Raises ConfigError for a value out of range.
    """

    checkpoint: str
    output: Path
    speedup: float | None = None
    strict: bool = False
    mean_layers: float | None = None
    trials: int = 20
    task: str | None = None
    data_dir: str | None = None
    task_options: tuple[str, ...] = ()  # key=value
    limit: int | None = None
    batch_size: int = 32
    metric: str = "bleu"
    tokenizer: str | None = None
    decays: tuple[Decay, ...] = ("linear", "cosine", "power", "exponential", "step")
    warmup: tuple[int, ...] = (1, 2, 3)
    horizons: tuple[int, ...] | None = None  # None: 0.5 to 2 times that of the default schedule
    placements: tuple[Placement, ...] = ("top",)
    calibrate: bool = False
    max_new_tokens: int | None = None
    dtype: str | None = None
    weights: Weights | None = None
    device: str | None = None
    trust_remote_code: bool = False  # run Python code that the checkpoint contains
    gguf_file: str | None = None  # a GGUF file in the checkpoint folder to read the model from
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.speedup is None) == (self.mean_layers is None):
            raise ConfigError("give a budget as either --speedup or --mean-layers")
        if self.speedup is not None and not 1 < self.speedup < float("inf"):
            raise ConfigError(f"--speedup is {self.speedup:g}: it must be above 1, since 1x has a single schedule")
        if self.mean_layers is not None and not 1 <= self.mean_layers < float("inf"):
            raise ConfigError(f"--mean-layers is {self.mean_layers:g}: it must be at least 1")
        if self.mean_layers is not None and self.strict:
            raise ConfigError("--strict is for --speedup: a budget in layers can always be reached; leave --strict out")
        if self.mean_layers is not None and self.calibrate:
            raise ConfigError(
                "--calibrate is for --speedup: a budget in layers needs no profile; leave --calibrate out"
            )
        if not 2 <= self.trials <= MAX_TRIALS:
            raise ConfigError(
                f"--trials is {self.trials}: it must be at least 2 (the default schedule and another) and at most "
                f"{MAX_TRIALS}"
            )
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"--seed is {self.seed}: it must lie between 0 and {2**32 - 1}")
        if self.limit is not None and self.limit < 2:
            raise ConfigError(f"--limit is {self.limit}: it must be at least 2, since intervals need two prompts")
        check_new_tokens(self.max_new_tokens)
        if self.batch_size < 1:
            raise ConfigError(f"--batch-size is {self.batch_size}: it must be at least 1")
        if self.metric not in METRICS:
            raise unknown("--metric", self.metric, METRICS)
        check_tokenizer(self.tokenizer)

    @property
    def target(self) -> str:
        """The budget as text."""
        return f"{self.speedup:g}x" if self.speedup is not None else f"{self.mean_layers:g} layers on average"

    def to_dict(self) -> dict[str, Any]:
        """The options that the results depend on; the data is compared by content, so --data-dir is excluded."""
        values = {key: value for key, value in asdict(self).items() if key not in ("output", "data_dir")}
        return {_option(key): list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _option(key: str) -> str:
    return "--task-option" if key == "task_options" else f"--{key.replace('_', '-')}"
