"""The command line of the load test: `python -m eval.load --checkpoint DIR --output FILE`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from eval.cli import add_task
from eval.load.request import DEFAULT_RATES, LoadRequest
from skipdecode.cli.process import run_command
from skipdecode.cli.renamed_options import add_old_name
from skipdecode.kernels.linear import Weights

DESCRIPTION = """Load-test a server: requests arrive as a Poisson process at several rates, with prompts of
a task's test set, and decode until the end token. For each rate the report gives throughput,
time to first token, inter-token latency and end-to-end latency (50th, 95th and 99th
percentiles), as a table and a picture.

With --checkpoint it starts `skipdecode serve` and the baselines, each in its own process;
they take turns and get the same requests at the same times. With --url it tests a running
server, of this package or any other with OpenAI's API; OPENAI_API_KEY holds its key.

Measure at rate inf first, where all requests arrive at once: it gives the maximum
throughput. At higher request rates, latency grows for as long as requests arrive.

An interrupted benchmark continues when it is started again with the same options."""
EXAMPLES = """systems:
  1x, 3x, 2.5x   skipdecode serve, all requests at that speed; these systems share one server
  lossless       skipdecode serve with self-speculative decoding: the output of full depth
  lock-step-3x   static batching with skip_generate: no request joins a running batch, and
                 all answers of a batch are sent when its last sequence ends
  transformers   transformers serve --continuous-batching, which runs every layer
  standalone     transformers serve on a folder written by `skipdecode export --standalone`,
                 given with --standalone DIR

examples:
  python -m eval.load --checkpoint outputs/e2e-tiny --data-dir E2E --rate inf --output outputs/max.json
  python -m eval.load --checkpoint outputs/e2e-tiny --data-dir E2E --rate 20 40 80 inf \\
      --system 1x 2x 3x lock-step-3x transformers --requests 300 --output outputs/load.json
  python -m eval.load --url http://127.0.0.1:8000/v1 --task e2e --data-dir E2E --output outputs/mine.json"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status, as `run_command` does."""
    options = vars(_parser().parse_args(arguments))
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
    return run_command(lambda: _benchmark(values), left=lambda: "run the same command again to continue")


def _benchmark(values: dict[str, Any]) -> None:
    request = LoadRequest(**values)
    from eval.load.run import benchmark  # imported here, after options are parsed: it takes seconds

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
    what.add_argument("--checkpoint", metavar="DIR", help="the checkpoint to serve: a run folder or a Hub name")
    what.add_argument("--url", help="the address of a running server, such as http://127.0.0.1:8000/v1")
    add(
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help="a new .json file; .md and .png are written beside it",
    )
    add(
        "--model",
        metavar="NAME",
        help="the model name to request at --url; default: the first one that the server lists",
    )
    systems = "systems to test, listed below; default: 1x 2x 3x, or with --url the default of the server"
    add("--system", dest="systems", nargs="+", default=[], metavar="NAME", help=systems)
    add(
        "--strict",
        action="store_true",
        help="fail on a speed that the server can't reach; by default the report marks it",
    )
    add(
        "--standalone",
        metavar="DIR",
        help="a folder written by `skipdecode export --standalone`, for the system standalone",
    )
    rates = "request rates per second, or inf: all at once; default: " + " ".join(f"{rate:g}" for rate in DEFAULT_RATES)
    add("--rate", dest="rates", type=float, nargs="+", default=list(DEFAULT_RATES), metavar="R", help=rates)
    add("--requests", type=int, default=100, metavar="N", help="requests per system, rate and round (default 100)")
    add(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="rounds in which every system is tested at every rate (default 3)",
    )
    add_task(parser)
    add("--max-new-tokens", type=int, metavar="N", help="default: the task's")
    add(
        "--rows",
        type=int,
        default=32,
        metavar="N",
        help="maximum number of sequences that a server started here decodes at once (default 32)",
    )
    wave = "while sequences decode, admit new requests only when this many wait (default 1: immediately)"
    add("--wave-rows", type=int, default=1, metavar="N", help=wave)
    add(
        "--wave-seconds",
        type=float,
        default=0.05,
        metavar="S",
        help="or when the first has waited this long (default 0.05)",
    )
    add(
        "--weights",
        choices=get_args(Weights),
        help="weight format, as in skip_generate; default: the one that it chooses",
    )
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="default: the checkpoint's")
    no_stream = add(
        "--no-stream",
        dest="stream",
        action="store_false",
        help="request complete answers instead of streams; only end-to-end latency is measured",
    )
    add_old_name(parser, "--whole", no_stream)
    add("--timeout", type=float, default=120.0, metavar="S", help="requests fail after this long (default 120)")
    add("--seed", type=int, default=0, help="seed of arrival times and the order of prompts (default 0)")
    return parser
