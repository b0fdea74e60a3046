"""The command line of the speed benchmark: `python -m eval.speed --model SHAPE_OR_DIR --output FILE`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from eval.speed.request import PEERS, SpeedRequest
from skipdecode.command import run_command
from skipdecode.projections import Weights


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status, as `run_command` does."""
    options = vars(_parser().parse_args(arguments))
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
    return run_command(lambda: _benchmark(values), left=lambda: "the same command goes on")


def _benchmark(values: dict[str, Any]) -> None:
    from eval.speed.run import benchmark  # here: it takes seconds, and a mistyped option should not

    benchmark(SpeedRequest(**values))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.speed",
        description="Time decoding at several target speeds, by the wall clock: each batch size a table, every decoder "
        "taking turns, medians [quartiles]; beside it the peers on the same weights, and the bytes that a step must "
        "read over the bytes per second that a large copy reaches. The report is written after each batch size; a "
        "benchmark that was cut off goes on when it is started again with the same options.",
        epilog="example: python -m eval.speed --model opt-1.3b --dtype bfloat16 --batch-size 1 8 --output speed.json",
    )
    parser.add_argument(
        "--model", required=True, metavar="SHAPE_OR_DIR", help="a shape in configs/model (random weights), or a folder"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="a .json that isn't there yet")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the checkpoint brings")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, …; default: cuda where there is one")
    parser.add_argument("--vocab-size", type=int, metavar="V", help="of a shape; default: the family's")
    parser.add_argument(
        "--batch-size", dest="batch_sizes", type=int, nargs="+", default=[1], metavar="B", help="default: 1"
    )
    parser.add_argument("--prompt-length", type=int, default=64, metavar="P", help="default: 64")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument(
        "--speedup",
        dest="speedups",
        type=float,
        nargs="+",
        default=[1, 2, 3, 4, 5],
        metavar="X",
        help="targets; 1x is added",
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        choices=get_args(Weights),
        help="kinds to time, as in skip_generate; default: what it chooses",
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["transformers"], help="default: transformers")
    parser.add_argument("--repeats", type=int, default=5, metavar="R", help="default: 5")
    parser.add_argument(
        "--predict", action="store_true", help="solve for the predicted clock instead of one that is calibrated first"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print where a decode step's time goes, at full depth and at the highest target",
    )
    return parser
