"""The command line of a search: `python -m eval.search --checkpoint DIR --speedup 3 --output DIR`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from eval.cli import add_gguf_file, add_task, add_tokenizer
from eval.search.paired import METRICS
from eval.search.request import SearchRequest
from skipdecode.cli.process import run_command
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.schedule import Decay, Placement


def main(arguments: Sequence[str] | None = None) -> int:
    """Search. Returns the exit status, as `run_command` does."""
    options = vars(_parser().parse_args(arguments))
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
    return run_command(lambda: _search(values), left=lambda: "the same command goes on")


def _search(values: dict[str, Any]) -> None:
    from eval.search.run import search  # here: it takes seconds, and a mistyped option should not

    search(SearchRequest(**values))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.search",
        description="Find the best max, min, warm-up, decay and horizon of a skip schedule for a budget, by decoding "
        "validation data, never the test set. The schedule that the checkpoint would use by itself is the first trial, "
        "and wins unless another is better beyond noise. After a quarter and a half of the prompts (where that is at "
        "least 64 or a batch) the worse half of the schedules leaves. All schedules take turns on each batch with each "
        "other and with full depth, so speeds are measured side by side and nothing is decoded for the clock alone. "
        "Writes winner.json (for schedule.files of a recipe and for python -m eval --schedule), search.json, "
        "search.md, search.png, and trials.jsonl batch by batch: started again with the same arguments, a search that "
        "was cut off goes on.",
        epilog="example: python -m eval.search --checkpoint outputs/e2e-tiny --data-dir E2E --speedup 3 --output found",
    )
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="a finished run's folder, or a Hub name")
    add_gguf_file(parser)
    add("--output", required=True, type=Path, metavar="DIR", help="a folder: new, or of the same search")
    add("--speedup", type=float, metavar="X", help="the budget: a target for the wall clock, as in python -m eval")
    add(
        "--strict",
        action="store_true",
        help="refuse a --speedup that can't be reached; without it schedules are searched as fast as the fastest that "
        "the checkpoint was trained for, and the report says so",
    )
    add("--mean-layers", type=float, metavar="K", help="or: layers per generated token over the default's horizon")
    add("--trials", type=int, default=20, metavar="N", help="schedules, the default among them (default 20)")
    add_task(parser)
    add("--limit", type=int, metavar="N", help="only the first N prompts of the validation data")
    add("--batch-size", type=int, default=32, metavar="B", help="prompts decoded together (default 32)")
    add("--metric", default="bleu", choices=METRICS, help="what is best (default bleu)")
    add_tokenizer(parser)
    decays = list(SearchRequest.decays)
    add("--decays", nargs="+", choices=get_args(Decay), default=decays, help=f"to try; default: {' '.join(decays)}")
    add("--warmup", nargs="+", type=int, default=list(SearchRequest.warmup), metavar="W", help="to try; default: 1 2 3")
    add("--horizons", nargs="+", type=int, metavar="H", help="to try; default: half to twice the default schedule's")
    add("--placements", nargs="+", choices=get_args(Placement), default=["top"], help="to try; default: top")
    add("--calibrate", action="store_true", help="predict speeds by steps that are timed here first")
    add("--max-new-tokens", type=int, metavar="N", help="default: the task's")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="default: the checkpoint's")
    add(
        "--weights",
        choices=get_args(Weights),
        help="what prompts and decode steps are computed with, as in skip_generate",
    )
    add("--trust-remote-code", action="store_true", help="run Python code that the checkpoint brings")
    add("--device", help="cpu, cuda, cuda:1, …; default: cuda where there is one")
    add("--seed", type=int, default=0, help="of schedules drawn, the order of prompts and the bootstrap (default 0)")
    return parser
