"""The command line of the speed benchmark: `python -m eval.speed --model SHAPE_OR_DIR --output FILE`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from eval.speed.request import PEERS, SpeedRequest
from skipdecode.cli.process import run_command
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.schedule import Over

DESCRIPTION = """Measure the wall-clock time of prefill and decode at several target speedups, with
synthetic prompts. There is a table for each batch size: medians over repeats [quartiles],
with all decoders taking turns; other libraries (peers) on the same weights; and how near
decoding comes to the memory bandwidth of the machine.

The report is written after each batch size. An interrupted benchmark continues when it is
started again with the same options. --merge combines the reports of several runs, ideally
at different times of day, in one table."""
EXAMPLES = """examples:
  python -m eval.speed --model opt-1.3b --dtype bfloat16 --batch-size 1 8 --output speed.json
  python -m eval.speed --model llama-1.1b --dtype bfloat16 --weights int8 int4 --peers llama.cpp --output a.json
  python -m eval.speed --merge a.json b.json c.json --output speed.md"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status, as `run_command` does."""
    options = vars(_parser().parse_args(arguments))
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
    if reports := values.pop("merge"):
        return run_command(lambda: _merge(reports, values["output"]))
    return run_command(lambda: _benchmark(values), left=lambda: "run the same command again to continue")


def _merge(reports: tuple[Path, ...], output: Path) -> None:
    from eval.speed.merge import merge

    merge(reports, output)


def _benchmark(values: dict[str, Any]) -> None:
    from eval.speed.run import benchmark  # imported here, after options are parsed: it takes seconds

    benchmark(SpeedRequest(**values))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.speed",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model",
        metavar="SHAPE_OR_DIR",
        help="the name of a shape in configs/model (random weights), or a checkpoint folder",
    )
    several = "merge reports of the same benchmark into a .md file: medians and the worst run"
    what.add_argument("--merge", nargs="+", type=Path, metavar="REPORT", help=several)
    add("--gguf-file", metavar="FILE", help="read the model from this GGUF file in the folder, dequantized")
    add(
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help="a new .json file (.md with --merge); .md and .png are written beside it",
    )
    add("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    add("--trust-remote-code", action="store_true", help="run Python code that the checkpoint contains")
    add("--device", help="cpu, cuda, cuda:1, …; default: cuda where there is one")
    add("--vocab-size", type=int, metavar="V", help="vocabulary size of a shape; default: the family's")
    add(
        "--batch-size",
        dest="batch_sizes",
        type=int,
        nargs="+",
        default=[1],
        metavar="B",
        help="batch sizes (default 1)",
    )
    add("--prompt-length", type=int, default=64, metavar="P", help="prompt tokens (default 64)")
    add("--new-tokens", type=int, default=64, metavar="N", help="generated tokens (default 64)")
    targets = list(SpeedRequest.speedups)
    add(
        "--speedup",
        dest="speedups",
        type=float,
        nargs="+",
        default=targets,
        metavar="X",
        help="target speedups; 1x is added (default 1 2 3 4 5)",
    )
    over = "the speedup that targets apply to: decode (default), or all: end-to-end (prefill + decode)"
    add("--over", choices=get_args(Over), default="decode", help=over)
    stop = "prompts run only this many layers, as with schedule.prompt_stop in a recipe; default: all layers"
    add("--prompt-stop", type=int, metavar="N", help=stop)
    kinds = "weight formats to time, as in skip_generate; default: the one that it chooses"
    add("--weights", nargs="+", choices=get_args(Weights), help=kinds)
    peers = "other libraries to time on the same weights (default transformers). ctranslate2 (float32 or int8) needs "
    peers += "the extra speed; llama.cpp (Llama models only, Q8_0 and Q4_0) needs the extra llama-cpp"
    add("--peers", nargs="*", choices=PEERS, default=["transformers"], help=peers)
    add("--repeats", type=int, default=5, metavar="R", help="timed runs of each decoder (default 5)")
    predict = "solve targets with the analytical cost model instead of calibrating this machine first"
    add("--predict", action="store_true", help=predict)
    where = "print the time of a decode step by operation, at full depth and at the highest target"
    add("--profile", action="store_true", help=where)
    return parser
