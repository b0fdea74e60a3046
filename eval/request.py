"""The request for an evaluation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eval.results import FILE_NAME
from eval.score.metric import BertModel
from eval.score.tokenizers import check_tokenizer
from skipdecode.errors import ConfigError
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.schedule import Over


@dataclass(frozen=True)
class Request:
    """An evaluation, as the options of `python -m eval` ask for it; each field is the option of its name.

    Raises:
        ConfigError: for values that no evaluation can have.
    """

    checkpoint: str
    output: Path
    speedups: tuple[float, ...] = ()  # of targets; none: as `eval.loading.Loaded` says
    over: Over | None = None  # what targets are of; None: what the checkpoint was trained for
    strict: bool = False  # whether a target that can't be reached is refused
    schedules: tuple[str, ...] = ()  # files, decoded beside the targets
    lossless: tuple[float | None, ...] = ()  # speedups that draft for full depth; None: as many layers as pay
    order: str | None = None  # a file with the order of layers that `lossless` "auto" drafts by; None: as trained
    agreement: bool = False  # whether to count the tokens that full depth would have chosen
    system: Literal["skip", "calm"] = "skip"
    calm_thresholds: tuple[float, ...] = ()
    reference: str | None = None
    task: str | None = None
    data_dir: str | None = None
    task_options: tuple[str, ...] = ()  # key=value
    limit: int | None = None
    batch_size: int = 32
    time_batch_sizes: tuple[int, ...] = ()  # none: batch_size
    time_limit: int | None = None
    max_new_tokens: int | None = None
    dtype: str | None = None
    weights: Weights | None = None
    calibrate: bool = False
    device: str | None = None
    device_map: str | None = None  # how layers lie on the devices of one process, as transformers says; None: on one
    tensor_parallel: bool = False  # whether the processes share each layer, by the model's own plan in transformers
    command: str | None = None  # that a report repeats; None: this process' own
    trust_remote_code: bool = False  # of the checkpoints: whether Python code that they bring runs
    gguf_file: str | None = None  # in the checkpoint's folder, to read it from
    compare: Mapping[str, Path] | None = None
    metrics: tuple[str, ...] | None = None  # None: the task's
    bert: BertModel | None = None  # of BERTScore, which is computed where one is named
    tokenizer: str | None = None  # whose words metrics count, a name in eval.score.tokenizers; None: each its own

    def __post_init__(self) -> None:
        counts = {"--limit": self.limit, "--batch-size": self.batch_size}
        for name, value in {**counts, "--time-limit": self.time_limit}.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: it must be at least 1")
        check_new_tokens(self.max_new_tokens)
        sizes = self.time_batch_sizes
        if _repeats(sizes) or min(sizes, default=1) < 1:
            raise ConfigError(f"--time-batch-size is {list(sizes)}: name different sizes of 1 or more, such as 1 8")
        if not sizes:
            object.__setattr__(self, "time_batch_sizes", (self.batch_size,))
        speedups = self.speedups
        if _repeats(speedups) or not all(1 <= speedup < math.inf for speedup in speedups):
            raise ConfigError(f"--speedup is {list(speedups)}: name different targets of 1 or more, such as 1 2 4")
        if _repeats(self.lossless) or not all(drafts is None or 1 < drafts < math.inf for drafts in self.lossless):
            asked = ["auto" if drafts is None else drafts for drafts in self.lossless]
            raise ConfigError(f"--lossless is {asked}: name different speedups above 1, such as 3 4, or auto")
        if self.order is not None and None not in self.lossless:
            raise ConfigError("--order says which layers draft for --lossless auto: name that, or leave --order out")
        check_tokenizer(self.tokenizer)
        if (name := Path(self.checkpoint).resolve().name) in (self.compare or {}):
            raise ConfigError(f"--compare names {name!r}, as the checkpoint's own line is called: name it otherwise")
        self._check_system()
        self._check_placing()

    def _check_system(self) -> None:
        thresholds = self.calm_thresholds
        if self.system == "skip" and thresholds:
            raise ConfigError("--calm-threshold is for --system calm")
        if self.system == "calm" and self.schedules:
            raise ConfigError("--schedule is for --system skip: confidence exits follow no schedule")
        if _repeats(thresholds) or not all(0 <= value < math.inf for value in thresholds):
            raise ConfigError(f"--calm-threshold is {list(thresholds)}: name different values of 0 or more")
        if thresholds and self.speedups:
            raise ConfigError("--calm-threshold names thresholds in place of targets: leave --speedup out")
        if self.system == "calm" and self.reference is not None and not thresholds and not self.speedups:
            raise ConfigError(
                "--system calm with --reference takes no exits by itself: name --speedup targets, or --calm-threshold"
            )
        if self.reference is not None and self.reference == self.checkpoint:
            raise ConfigError(f"--reference is {self.reference!r}: that is the checkpoint itself")

    def _check_placing(self) -> None:
        if self.device_map is not None and self.tensor_parallel:
            raise ConfigError("--device-map says where the layers lie: leave --tensor-parallel out")
        if self.device is not None and (self.device_map is not None or self.tensor_parallel):
            option = "--tensor-parallel" if self.tensor_parallel else "--device-map"
            raise ConfigError(f"--device is {self.device!r}: {option} says where the model lies; leave --device out")
        spread = self.device_map is not None or self.tensor_parallel
        if spread and self.weights not in (None, "model"):
            raise ConfigError(f"--weights is {self.weights}: a model on several devices decodes with its own weights")
        if self.tensor_parallel and self.calibrate:
            raise ConfigError("--calibrate: the clock of a model that processes share isn't measured; leave it out")
        if spread and self.lossless:
            raise ConfigError("--lossless: a model on several devices can't verify drafts; leave it out")
        if self.tensor_parallel and self.system == "calm":
            raise ConfigError("--system calm: exits are taken within one process; leave --tensor-parallel out")

    def check_output(self) -> None:
        """Raises ConfigError for an output that holds a report."""
        if (self.output / FILE_NAME).exists():
            raise ConfigError(f"--output {self.output} already holds a report: name another folder, or remove it")


def check_new_tokens(count: int | None) -> None:
    """Raises ConfigError for texts that are too short to be decoded: their first token is the prompt's."""
    if count is not None and count < 2:
        raise ConfigError(f"--max-new-tokens is {count}: it must be at least 2, of which the second is decoded")


def _repeats(values: Sequence[float | None]) -> bool:
    return len(set(values)) != len(values)
