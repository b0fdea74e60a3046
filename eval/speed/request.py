"""The request for a speed benchmark."""

import math
from dataclasses import dataclass
from pathlib import Path

from eval.output import check_benchmark_output
from skipdecode.errors import ConfigError
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.schedule import Over

MAX_COUNT = 1_000_000  # of sequences, tokens and repeats
PEERS = ("transformers", "transformers-static", "ctranslate2", "llama.cpp")


@dataclass(frozen=True)
class SpeedRequest:
    """The options of `python -m eval.speed`.

    Raises ConfigError for values out of range, and for an output that already exists and isn't unfinished.
    """

    model: str
    output: Path
    dtype: str = "float32"
    trust_remote_code: bool = False
    gguf_file: str | None = None
    device: str | None = None
    vocab_size: int | None = None
    batch_sizes: tuple[int, ...] = (1,)
    prompt_length: int = 64
    new_tokens: int = 64
    speedups: tuple[float, ...] = (1, 2, 3, 4, 5)
    over: Over = "decode"
    prompt_stop: int | None = None
    weights: tuple[Weights, ...] | None = None
    peers: tuple[str, ...] = ("transformers",)
    repeats: int = 5
    predict: bool = False
    profile: bool = False

    def __post_init__(self) -> None:
        counts = [("--batch-size", size, 1) for size in self.batch_sizes]
        counts += [("--prompt-length", self.prompt_length, 1), ("--new-tokens", self.new_tokens, 2)]
        counts += [("--repeats", self.repeats, 1)]
        counts += [("--prompt-stop", self.prompt_stop, 1)] if self.prompt_stop is not None else []
        # Random prompts use token ids from 4, after the special tokens.
        counts += [("--vocab-size", self.vocab_size, 5)] if self.vocab_size is not None else []
        for name, number, minimum in counts:
            if not minimum <= number <= MAX_COUNT:
                raise ConfigError(f"{name} is {number}: it must lie between {minimum} and {MAX_COUNT}")
        if not all(1 <= speedup < math.inf for speedup in self.speedups):
            raise ConfigError(f"--speedup is {list(self.speedups)}: name different targets of 1 or more, such as 1 2 4")
        several = {"--speedup": self.speedups, "--batch-size": self.batch_sizes, "--peers": self.peers}
        for name, values in {**several, "--weights": self.weights or ()}.items():
            if len(set(values)) != len(values):
                raise ConfigError(f"{name} is {list(values)}: name each once")
        check_benchmark_output(self.output)
