"""Measure how much faster a test set is decoded if finished sequences leave their batch.

    python scripts/benchmark_ended_rows.py --checkpoint outputs/e2e-tiny --data-dir E2E_FOLDER

Batches have prompts of similar length, as in `python -m eval`, or with --shuffle of any length. On each batch, every
target speedup is run with and without leaving, which must give identical outputs. Without it, every step computes all
sequences of the batch; with it, only the unfinished ones, also where a kernel runs several steps at a time.
"""

import argparse
import random
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.progress import track
from rich.table import Table

from eval.loading import load_request
from eval.request import Request
from eval.systems.base import SkipSystem
from skipdecode.cli.process import run_command
from skipdecode.fastpath import row_compaction as rows
from skipdecode.generate.runners import FastRunner
from skipdecode.generate.skip_generate import resolve_plan
from skipdecode.kernels.linear import Weights
from skipdecode.timing.interleave import order_of_turn

SHARES = {"without": 0.0, "with": rows.MAX_UNFINISHED_SHARE}
CHOOSE = {"without": lambda *_: None, "with": FastRunner.choose}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data-dir")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--speedup", type=float, nargs="+", default=[1, 3])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--weights", choices=get_args(Weights), default="packed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as output:
        request = Request(options.checkpoint, Path(output), data_dir=options.data_dir, limit=options.limit)
        loaded = load_request(request)
    checkpoint = replace(loaded.checkpoint, weights=options.weights)
    systems = {
        speedup: SkipSystem(f"{speedup:g}x", checkpoint, resolve_plan(checkpoint.model, None, speedup).schedule)
        for speedup in options.speedup
    }
    prompts = sorted(loaded.prompt_ids, key=len)
    if options.shuffle:
        random.Random(0).shuffle(prompts)
    table = Table(title=f"{options.checkpoint}, {len(prompts)} prompts, decoding seconds")
    for name in ("batch size", "target", "sequences per step", "without", "with", "ratio", "ratio with prefill"):
        table.add_column(name, justify="right")
    for batch_size in options.batch_size:
        batches = [prompts[at : at + batch_size] for at in range(0, len(prompts), batch_size)]
        seconds = {(speedup, side): [] for speedup in systems for side in SHARES}
        whole = {key: [] for key in seconds}
        for repeat in track(range(options.repeats + 1), f"batch {batch_size}", console=Console(stderr=True)):
            found = {key: [] for key in seconds}
            for number, batch in enumerate(batches):
                for speedup, side in order_of_turn(list(found), number + repeat):
                    rows.MAX_UNFINISHED_SHARE, FastRunner.choose = SHARES[side], CHOOSE[side]
                    found[speedup, side].append(systems[speedup].decode(batch, loaded.max_new_tokens))
            for key, decoded in found.items():
                if repeat:  # the first repeat warms up
                    seconds[key].append(sum(each.decode_seconds for each in decoded))
                    whole[key].append(sum(each.decode_seconds + each.prefill_seconds for each in decoded))
            for speedup in systems:
                one, other = ([each.texts for each in found[speedup, side]] for side in SHARES)
                if one != other:
                    raise SystemExit(f"outputs differ at {speedup:g}x, batch size {batch_size}")
        for speedup in systems:
            decoded = found[speedup, "with"]
            without, leaving = (seconds[speedup, side] for side in SHARES)
            mean = sum(each.tokens for each in decoded) / sum(each.steps for each in decoded)
            table.add_row(
                str(batch_size),
                f"{speedup:g}x",
                f"{mean:.1f}",
                f"{statistics.median(without):.2f}",
                f"{statistics.median(leaving):.2f}",
                _ratio(without, leaving),
                _ratio(*(whole[speedup, side] for side in SHARES)),
            )
    Console().print(table)
    return 0


def _ratio(without: list[float], leaving: list[float]) -> str:
    ratios = sorted(before / after for before, after in zip(without, leaving, strict=True))
    return f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"


if __name__ == "__main__":
    sys.exit(run_command(main))
