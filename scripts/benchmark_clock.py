"""Compare the measured time of batches with the time that the calibrated profile predicts, for each schedule.

    skipdecode calibrate outputs/e2e-tiny
    python scripts/benchmark_clock.py --checkpoint outputs/e2e-tiny --data-dir E2E_FOLDER --budgets 12:12 9:2 5:5

Schedules take turns on every batch. All generate sequences of full depth's lengths, which are given to the profile too,
so the ratio shows only its errors. At 1.10, batches took 10 % longer than predicted; if full depth and a schedule have
the same ratio, the predicted speedup between them is right.
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.progress import track

from eval.loading import load_request
from eval.request import Request
from eval.systems.base import SkipSystem
from eval.tables import Table
from skipdecode import ConfigError, SkipSchedule
from skipdecode.cli.process import run_command
from skipdecode.families import decoder_layers
from skipdecode.generate.fast_path import fast_path
from skipdecode.kernels.linear import Weights
from skipdecode.timing.interleave import order_of_turn

HEADERS = ("batch size", "budgets", "decode, ms", "measured / predicted", "prefill, ms", "measured / predicted")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--task", help="default: the checkpoint's")
    parser.add_argument("--data-dir")
    parser.add_argument("--budgets", nargs="+", type=budgets, default=[(12, 12)], metavar="MAX:MIN")
    parser.add_argument("--horizon", type=int, default=36, help="tokens over which budgets decay (default 36)")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[32, 8, 1])
    parser.add_argument("--limit", type=int, help="number of prompts")
    parser.add_argument("--max-new-tokens", type=int, help="size of the caches; default: the task's")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--weights", choices=get_args(Weights), default="packed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as output:
        request = Request(
            options.checkpoint, Path(output), task=options.task, data_dir=options.data_dir, limit=options.limit
        )
        loaded = load_request(request)
    checkpoint = replace(loaded.checkpoint, weights=options.weights)
    profile = fast_path(checkpoint.model).profile(checkpoint.weights)
    if profile is None:
        raise ConfigError(f"there is no calibrated profile for {options.checkpoint}: run skipdecode calibrate first")
    layers, max_new_tokens = len(decoder_layers(checkpoint.model)), options.max_new_tokens or loaded.max_new_tokens
    full = SkipSystem("full depth", checkpoint, SkipSchedule.full_depth(layers))
    systems = [
        SkipSystem(
            f"{highest} to {lowest}",
            checkpoint,
            SkipSchedule(layers, highest, lowest, horizon=options.horizon, prompt="max"),
        )
        for highest, lowest in options.budgets
    ]
    prompts = sorted(loaded.prompt_ids, key=len)
    rows = []
    for size in options.batch_size:
        batches = [prompts[at : at + size] for at in range(0, len(prompts) - size + 1, size)]
        if not batches:
            raise ConfigError(f"--batch-size is {size}: there are {len(prompts)} prompts")
        lengths = [full.decode(batch, max_new_tokens).lengths for batch in batches]
        took: dict[str, list[tuple[float, float, float, float]]] = {system.label: [] for system in systems}
        for repeat in track(range(options.repeats + 1), f"batch {size}", console=Console(stderr=True)):
            for number, (batch, own) in enumerate(zip(batches, lengths, strict=True)):
                padded, tokens = max(map(len, batch)), round(statistics.fmean(map(len, batch)))
                alive = [sum(length > step + 1 for length in own) for step in range(max(own) - 1)]
                steps = tuple((1.0, float(left)) for left in alive)  # finished sequences leave the batch
                cost = profile.at(batch_size=size, prompt_length=padded, prompt_tokens=tokens, expected_steps=steps)
                for system in order_of_turn(systems, number + repeat):
                    found = system.decode(batch, max_new_tokens, own)
                    predicted, prompt = cost.decode_seconds(system.cached), cost.prompt_seconds(system.cached)
                    if repeat:  # the first repeat warms up
                        took[system.label].append((found.decode_seconds, predicted, found.prefill_seconds, prompt))
        for label, seconds in took.items():
            decode, predicted, prefill, prompt = (sum(each) for each in zip(*seconds, strict=True))
            cells = [f"{1e3 * decode / len(seconds):.2f}", f"{decode / predicted:.3f}"]
            cells += [f"{1e3 * prefill / len(seconds):.2f}", f"{prefill / prompt:.3f}"]
            rows.append([str(size), label, *cells])
    Console().print(Table(HEADERS, rows).to_markdown(), soft_wrap=True, markup=False)
    return 0


def budgets(text: str) -> tuple[int, int]:
    highest, _, lowest = text.partition(":")
    return int(highest), int(lowest)


if __name__ == "__main__":
    sys.exit(run_command(main))
