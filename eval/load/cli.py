"""The command line of the benchmark under load: `python -m eval.load --checkpoint DIR --output FILE`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from eval.cli import add_task
from eval.load.request import DEFAULT_RATES, LoadRequest
from skipdecode.cli.process import run_command
from skipdecode.kernels.linear import Weights

DESCRIPTION = """Put a server under load: requests come at random (Poisson) at several rates, with the
prompts of a task's test set, and end where their texts do. For each rate: throughput, and how
long clients wait for the first token, between tokens and for the whole, 50th, 95th and 99th
percentile; as a table and a picture.

With --checkpoint it starts `skipdecode serve` and what it is compared with, one process each,
which take turns, the same requests at the same times. With --url it asks a server that runs,
of this package or any other with OpenAI's interface; a key is read from OPENAI_API_KEY.

To find what a server can carry, ask at rate inf first: all requests come at once. Beyond that
rate the wait grows for as long as requests come.

A benchmark that was cut off goes on when it is started again with the same options."""
EXAMPLES = """systems:
  1x, 3x, 2.5x   skipdecode serve, each request at that speed; they share one server
  lossless       full depth's own text, drafted and verified
  lock-step-3x   batches of skip_generate that nobody joins; answers come when the last text ends
  transformers   transformers serve --continuous-batching, which runs every layer
  standalone     the same of a folder that `skipdecode export --standalone` wrote (--standalone DIR)

examples:
  python -m eval.load --checkpoint outputs/e2e-tiny --data-dir E2E --rate inf --output outputs/most.json
  python -m eval.load --checkpoint outputs/e2e-tiny --data-dir E2E --rate 20 40 80 inf \\
      --system 1x 2x 3x lock-step-3x transformers --requests 300 --output outputs/load.json
  python -m eval.load --url http://127.0.0.1:8000/v1 --task e2e --data-dir E2E --output outputs/mine.json"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status, as `run_command` does."""
    options = vars(_parser().parse_args(arguments))
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
    return run_command(lambda: _benchmark(values), left=lambda: "the same command goes on")


def _benchmark(values: dict[str, Any]) -> None:
    request = LoadRequest(**values)
    from eval.load.run import benchmark  # here: it takes seconds, and a mistyped option should not

    benchmark(request)


def _parser() -> argparse.ArgumentParser:
    """Each option's `dest` is a field of eval.load.request.LoadRequest."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.load",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--checkpoint", metavar="DIR", help="a finished run's folder, or a Hub name, which is served")
    what.add_argument("--url", help="of a server that runs, such as http://127.0.0.1:8000/v1")
    add("--output", required=True, type=Path, metavar="FILE", help="a .json that isn't there yet")
    add("--model", metavar="NAME", help="that is asked for at --url; default: the first that the server names")
    systems = "default: 1x 2x 3x, or at a --url what the server does by itself"
    add("--system", dest="systems", nargs="+", default=[], metavar="NAME", help=systems)
    add(
        "--strict",
        action="store_true",
        help="refuse a speed that a server says it can't reach; without it the report marks such rows",
    )
    add("--standalone", metavar="DIR", help="what `skipdecode export --standalone` wrote, for the system of that name")
    rates = "requests a second, or inf: all at once; default: " + " ".join(f"{rate:g}" for rate in DEFAULT_RATES)
    add("--rate", dest="rates", type=float, nargs="+", default=list(DEFAULT_RATES), metavar="R", help=rates)
    add("--requests", type=int, default=100, metavar="N", help="of a turn: a system at a rate (default 100)")
    add("--rounds", type=int, default=3, metavar="N", help="each system takes a turn at each rate so often (default 3)")
    add_task(parser)
    add("--max-new-tokens", type=int, metavar="N", help="default: the task's")
    add(
        "--rows",
        type=int,
        default=32,
        metavar="N",
        help="texts that a server started here decodes at once (default 32)",
    )
    wave = "while texts decode, others are admitted when so many wait (default 1: at once)"
    add("--wave-rows", type=int, default=1, metavar="N", help=wave)
    add("--wave-seconds", type=float, default=0.05, metavar="S", help="or when the first has waited so long (0.05)")
    add("--weights", choices=get_args(Weights), help="as in skip_generate; default: what it chooses")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="default: the checkpoint's")
    add("--whole", action="store_true", help="ask for answers in one piece: the time to the end alone is measured")
    add("--timeout", type=float, default=120.0, metavar="S", help="a request is given up after so long (default 120)")
    add("--seed", type=int, default=0, help="of arrivals and of the order of prompts (default 0)")
    return parser
