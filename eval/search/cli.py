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
    return run_command(lambda: _search(values), left=lambda: "run the same command again to continue")


def _search(values: dict[str, Any]) -> None:
    from eval.search.run import search  # imported here, after options are parsed: it takes seconds

    search(SearchRequest(**values))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.search",
        description="Find the best max, min, warm-up, decay and horizon of a skip schedule for a budget, by decoding "
        "validation data (never the test set). The first trial is the checkpoint's default schedule, which wins unless "
        "another is significantly better. The worse half of the schedules is dropped after a quarter and after half of "
        "the prompts (of at least 64 prompts and a batch). All schedules and full depth take turns on each batch, so "
        "quality and speed are measured in the same run. Writes winner.json (for schedule.files of a recipe and for "
        "python -m eval --schedule), search.json, search.md, search.png, and trials.jsonl after each batch: an "
        "interrupted search continues when it is started again with the same options.",
        epilog="example: python -m eval.search --checkpoint outputs/e2e-tiny --data-dir E2E --speedup 3 --output found",
    )
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="a finished run's folder, or a Hub name")
    add_gguf_file(parser)
    add("--output", required=True, type=Path, metavar="DIR", help="a new folder, or that of the same search")
    add("--speedup", type=float, metavar="X", help="the budget as a target wall-clock decode speedup")
    add(
        "--strict",
        action="store_true",
        help="fail on a --speedup that can't be reached; by default the search uses the speed of the fastest schedule "
        "that the checkpoint was trained for, and the report says so",
    )
    add(
        "--mean-layers",
        type=float,
        metavar="K",
        help="the budget as mean layers per token over the default schedule's horizon",
    )
    add(
        "--trials",
        type=int,
        default=20,
        metavar="N",
        help="number of schedules, including the default schedule (default 20)",
    )
    add_task(parser)
    add("--limit", type=int, metavar="N", help="use only the first N validation prompts")
    add("--batch-size", type=int, default=32, metavar="B", help="prompts decoded together (default 32)")
    add("--metric", default="bleu", choices=METRICS, help="the metric to maximize (default bleu)")
    add_tokenizer(parser)
    decays = list(SearchRequest.decays)
    add(
        "--decays",
        nargs="+",
        choices=get_args(Decay),
        default=decays,
        help=f"decays to try (default {' '.join(decays)})",
    )
    add(
        "--warmup",
        nargs="+",
        type=int,
        default=list(SearchRequest.warmup),
        metavar="W",
        help="numbers of warm-up layers to try (default 1 2 3)",
    )
    add(
        "--horizons",
        nargs="+",
        type=int,
        metavar="H",
        help="horizons to try; default: 0.5 to 2 times that of the default schedule",
    )
    add("--placements", nargs="+", choices=get_args(Placement), default=["top"], help="placements to try (default top)")
    add("--calibrate", action="store_true", help="predict speeds with a profile of this machine that is measured first")
    add("--max-new-tokens", type=int, metavar="N", help="default: the task's")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="default: the checkpoint's")
    add(
        "--weights",
        choices=get_args(Weights),
        help="weight format of prefill and decode, as in skip_generate",
    )
    add("--trust-remote-code", action="store_true", help="run Python code that the checkpoint contains")
    add("--device", help="cpu, cuda, cuda:1, …; default: cuda where there is one")
    add("--seed", type=int, default=0, help="seed of the schedules drawn and the order of prompts (default 0)")
    return parser
