"""The command line of the speed benchmark: `python -m eval.speed --model SHAPE_OR_DIR --output FILE`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from eval.speed.request import PEERS, SpeedRequest
from skipdecode.cli.process import run_command
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.schedule import Over

DESCRIPTION = """Time decoding at several target speeds, by the wall clock: each batch size a table,
every decoder taking turns, medians [quartiles]; beside it the peers on the same weights,
and the bytes that a step must read over the bytes per second that a large copy reaches.

The report is written after each batch size; a benchmark that was cut off goes on when it
is started again with the same options. Several runs, best at different hours, become one
table with --merge."""
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
    return run_command(lambda: _benchmark(values), left=lambda: "the same command goes on")


def _merge(reports: tuple[Path, ...], output: Path) -> None:
    from eval.speed.merge import merge

    merge(reports, output)


def _benchmark(values: dict[str, Any]) -> None:
    from eval.speed.run import benchmark  # here: it takes seconds, and a mistyped option should not

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
    what.add_argument("--model", metavar="SHAPE_OR_DIR", help="a shape in configs/model (random weights), or a folder")
    several = "reports of the same benchmark: their medians, and the worst of them, into a .md"
    what.add_argument("--merge", nargs="+", type=Path, metavar="REPORT", help=several)
    add("--gguf-file", metavar="FILE", help="read the model from this GGUF file in the folder, dequantised")
    add("--output", required=True, type=Path, metavar="FILE", help="a .json that isn't there yet")
    add("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    add("--trust-remote-code", action="store_true", help="run Python code that the checkpoint brings")
    add("--device", help="cpu, cuda, cuda:1, …; default: cuda where there is one")
    add("--vocab-size", type=int, metavar="V", help="of a shape; default: the family's")
    add("--batch-size", dest="batch_sizes", type=int, nargs="+", default=[1], metavar="B", help="default: 1")
    add("--prompt-length", type=int, default=64, metavar="P", help="default: 64")
    add("--new-tokens", type=int, default=64, metavar="N", help="default: 64")
    targets = list(SpeedRequest.speedups)
    add("--speedup", dest="speedups", type=float, nargs="+", default=targets, metavar="X", help="targets; 1x is added")
    over = "what a target is of: decoding (default), or prompt and decoding together"
    add("--over", choices=get_args(Over), default="decode", help=over)
    stop = "layers that prompts run before they stop, as schedule.prompt_stop of a recipe; default: they don't"
    add("--prompt-stop", type=int, metavar="N", help=stop)
    kinds = "kinds to time, as in skip_generate; default: what it chooses"
    add("--weights", nargs="+", choices=get_args(Weights), help=kinds)
    beside = "on the same weights, in turns with ours; default: transformers. CTranslate2 (in float32 or int8) needs "
    beside += "the extra speed, llama.cpp (Llamas alone, in Q8_0 and Q4_0) the extra llama-cpp"
    add("--peers", nargs="*", choices=PEERS, default=["transformers"], help=beside)
    add("--repeats", type=int, default=5, metavar="R", help="default: 5")
    predict = "solve for the predicted clock instead of one that is calibrated first"
    add("--predict", action="store_true", help=predict)
    where = "print where a decode step's time goes, at full depth and at the highest target"
    add("--profile", action="store_true", help=where)
    return parser
