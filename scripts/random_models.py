"""What benchmarks of one device share: a model with random weights that is made there, and times that wait for it."""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from configs.shapes import random_model, read_shape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_parser(description: str | None, *, speedups: list[float], repeats: int) -> argparse.ArgumentParser:
    """A parser of the options that name a model and what is decoded with it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="opt-tiny", help="a name in configs/model/, or a YAML file")
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--speedup", type=float, nargs="+", default=speedups)
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=repeats)
    return parser


def make_model(options: argparse.Namespace, **changes: Any) -> Any:
    """The model that the options name, with `changes` of its shape.

    It is made on the device, so that billions of weights are neither made by the host nor copied from it.
    """
    shape = {"vocab_size": options.vocab_size, **read_shape(options.shape, "--shape"), **changes}
    with torch.device(DEVICE):
        return random_model(shape, getattr(torch, options.dtype))


def seconds(run: Callable[[], Any]) -> float:
    """The time until the device has done what `run` starts."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
