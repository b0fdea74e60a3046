"""Measure what prompts as CUDA graphs save: of the prefill, and end-to-end at each target.

    python scripts/benchmark_prompt_graphs.py --shape opt-1.3b --dtype bfloat16 --batch-size 1 8 32

Weights and prompts are random. The decoders take turns; seconds are medians over repeats, ratios have quartiles.
Targets are solved for decode steps, so that prompts run every layer. Without a GPU nothing is captured, and only the
program itself is checked.
"""

import functools
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.progress import track

from eval.tables import Table
from scripts.random_models import DEVICE, make_model, make_parser, seconds
from skipdecode import SkipSchedule, skip_generate, solve_schedule
from skipdecode.cli.process import run_command
from skipdecode.timing.interleave import Ratio, order_of_turn


def decode(model: Any, ids: torch.Tensor, schedule: SkipSchedule, captured: bool, new_tokens: int) -> None:
    """One generation; with `captured`, its prompts run as a CUDA graph too."""
    request = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    request |= {"attention_mask": torch.ones_like(ids), "cuda_graphs": True if captured else None}
    model.generate(ids, custom_generate=skip_generate, schedule=schedule, **request)


def main() -> int:
    parser = make_parser(__doc__, speedups=[2, 3, 4, 5], repeats=9)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    model = make_model(options).eval()
    targets = {1.0: SkipSchedule.full_depth(model.config.num_hidden_layers)}
    targets |= {each: solve_schedule(model, each, horizon=options.new_tokens) for each in options.speedup}
    rows = []
    for size in options.batch_size:
        ids = torch.randint(4, options.vocab_size, (size, options.prompt_length), device=DEVICE)

        runs = [
            (target, captured, new)
            for target in targets
            for captured in (False, True)
            for new in (1, options.new_tokens)
        ]
        times: dict[tuple[float, bool, int], list[float]] = {run: [] for run in runs}
        for turn in track(range(options.repeats + 3), f"batch {size}", console=Console(stderr=True)):
            for run in order_of_turn(runs, turn):
                taken = seconds(functools.partial(decode, model, ids, targets[run[0]], *run[1:]))
                if turn >= 3:  # shapes are captured in their second turn
                    times[run].append(taken)
        full = times[1.0, False, options.new_tokens]
        for target in targets:
            before, after = (times[target, captured, 1] for captured in (False, True))
            whole = [times[target, captured, options.new_tokens] for captured in (False, True)]
            saved = f"{Ratio.of(before, after)} of {1000 * statistics.median(before):.1f} ms"
            rows.append((str(size), f"{target:g}x", saved, *(str(Ratio.of(full, each)) for each in whole)))
    title = f"prompts as CUDA graphs, {options.shape}, {options.dtype}, {DEVICE}"
    headers = ("batch", "target", "prefill", "speedup (end-to-end), steps captured", "prompts captured too")
    Console().print(Table(headers, rows, title).to_rich())
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
