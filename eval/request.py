"""The request for an evaluation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data.task import Split
from eval.results import FILE_NAME
from eval.score.metric import BertModel
from eval.score.tokenizers import check_tokenizer
from skipdecode.errors import ConfigError
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.schedule import Over


@dataclass(frozen=True)
class Request:
    """The options of `python -m eval`, one per field.

    Raises:
        ConfigError: for invalid values and combinations.
    """

    checkpoint: str
    output: Path
    speedups: tuple[float, ...] = ()  # targets; empty: the defaults of `eval.loading.Loaded`
    over: Over | None = None  # the speedup that targets apply to; None: as in training
    strict: bool = False  # fail on a target that can't be reached
    schedules: tuple[str, ...] = ()  # files of additional schedules
    lossless: tuple[float | None, ...] = ()  # speedups of the drafts; None: best draft depth
    order: str | None = None  # a file with the order of layers for drafts of lossless "auto"; None: as trained
    agreement: bool = False  # count the tokens equal to full depth's choice
    system: Literal["skip", "calm"] = "skip"
    calm_thresholds: tuple[float, ...] = ()
    reference: str | None = None
    task: str | None = None
    data_dir: str | None = None
    task_options: tuple[str, ...] = ()  # key=value
    split: Split = "test"
    limit: int | None = None
    batch_size: int = 32
    time_batch_sizes: tuple[int, ...] = ()  # empty: batch_size
    time_limit: int | None = None
    max_new_tokens: int | None = None
    dtype: str | None = None
    weights: Weights | None = None
    calibrate: bool = False
    device: str | None = None
    device_map: str | None = None  # placement of layers on several devices, as in transformers; None: one device
    tensor_parallel: bool = False  # split each layer over the processes, by the plan of the model in transformers
    command: str | None = None  # the command shown in the report; None: that of this process
    trust_remote_code: bool = False  # run Python code that checkpoints contain
    gguf_file: str | None = None  # a GGUF file in the checkpoint folder to read the model from
    compare: Mapping[str, Path] | None = None
    metrics: tuple[str, ...] | None = None  # None: the task's
    bert: BertModel | None = None  # the model of BERTScore; None: BERTScore isn't computed
    tokenizer: str | None = None  # of metrics, a name in eval.score.tokenizers; None: each metric's own

    def __post_init__(self) -> None:
        counts = {"--limit": self.limit, "--batch-size": self.batch_size}
        for name, value in {**counts, "--time-limit": self.time_limit}.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: it must be at least 1")
        check_new_tokens(self.max_new_tokens)
        sizes = self.time_batch_sizes
        if _repeats(sizes) or min(sizes, default=1) < 1:
            raise ConfigError(
                f"--time-batch-size is {list(sizes)}: sizes must be different and at least 1, such as 1 8"
            )
        if not sizes:
            object.__setattr__(self, "time_batch_sizes", (self.batch_size,))
        speedups = self.speedups
        if _repeats(speedups) or not all(1 <= speedup < math.inf for speedup in speedups):
            raise ConfigError(f"--speedup is {list(speedups)}: targets must be different and at least 1, such as 1 2 4")
        if _repeats(self.lossless) or not all(drafts is None or 1 < drafts < math.inf for drafts in self.lossless):
            given = ["auto" if drafts is None else drafts for drafts in self.lossless]
            raise ConfigError(f"--lossless is {given}: speedups must be different and above 1, such as 3 4, or auto")
        if self.order is not None and None not in self.lossless:
            raise ConfigError("--order requires --lossless auto: add it, or leave --order out")
        check_tokenizer(self.tokenizer)
        if (name := Path(self.checkpoint).resolve().name) in (self.compare or {}):
            raise ConfigError(
                f"--compare names {name!r}, which is the name of the checkpoint's own line: use another name"
            )
        self._check_system()
        self._check_placing()

    def _check_system(self) -> None:
        thresholds = self.calm_thresholds
        if self.system == "skip" and thresholds:
            raise ConfigError("--calm-threshold requires --system calm")
        if self.system == "calm" and self.schedules:
            raise ConfigError("--schedule requires --system skip: confidence exits have no schedule")
        if _repeats(thresholds) or not all(0 <= value < math.inf for value in thresholds):
            raise ConfigError(f"--calm-threshold is {list(thresholds)}: thresholds must be different and at least 0")
        if thresholds and self.speedups:
            raise ConfigError("--calm-threshold replaces targets: leave --speedup out")
        if self.system == "calm" and self.reference is not None and not thresholds and not self.speedups:
            raise ConfigError(
                "--system calm with --reference has no default targets: give --speedup or --calm-threshold"
            )
        if self.reference is not None and self.reference == self.checkpoint:
            raise ConfigError(f"--reference is {self.reference!r}, the checkpoint itself: give another model")

    def _check_placing(self) -> None:
        if self.device_map is not None and self.tensor_parallel:
            raise ConfigError("--device-map and --tensor-parallel exclude each other: leave one out")
        if self.device is not None and (self.device_map is not None or self.tensor_parallel):
            option = "--tensor-parallel" if self.tensor_parallel else "--device-map"
            raise ConfigError(f"--device is {self.device!r}: {option} decides the placement; leave --device out")
        spread = self.device_map is not None or self.tensor_parallel
        if spread and self.weights not in (None, "model"):
            raise ConfigError(f"--weights is {self.weights}: a model on several devices supports --weights model only")
        if self.tensor_parallel and self.calibrate:
            raise ConfigError("--calibrate doesn't support --tensor-parallel: leave it out")
        if spread and self.lossless:
            raise ConfigError("--lossless doesn't support a model on several devices: leave it out")
        if self.tensor_parallel and self.system == "calm":
            raise ConfigError("--system calm supports a single process only: leave --tensor-parallel out")

    def check_output(self) -> None:
        """Raise ConfigError for an output that holds a report."""
        if (self.output / FILE_NAME).exists():
            raise ConfigError(f"--output {self.output} already holds a report: name another folder, or remove it")


def check_new_tokens(count: int | None) -> None:
    """Raise ConfigError for outputs without a decode step: prefill generates the first token."""
    if count is not None and count < 2:
        raise ConfigError(
            f"--max-new-tokens is {count}: it must be at least 2, since prefill generates the first token"
        )


def _repeats(values: Sequence[float | None]) -> bool:
    return len(set(values)) != len(values)
