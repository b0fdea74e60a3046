"""Decode a model that wasn't trained to skip, under the schedules of methods that need no training.

    python scripts/experiments/untrained.py CHECKPOINT --order order.json --data-dir E2E --output outputs/untrained

The checkpoint is fine-tuned at full depth. All methods get the same predicted speedup; prompts run every layer.
"""

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import AutoConfig

import eval.cli
from skipdecode.cli.process import run_command
from skipdecode.files import write_atomically
from skipdecode.schedule.solver import solve_schedule
from skipdecode.training.layer_order import read_order


def halving_order(num_layers: int) -> tuple[int, ...]:
    """Both ends of the stack, then the middles of the largest gaps: the first k layers are spread evenly for every k.

    >>> halving_order(9)
    (0, 8, 4, 2, 6, 1, 3, 5, 7)
    """
    order = [0, num_layers - 1] if num_layers > 1 else [0]
    while len(order) < num_layers:
        placed = sorted(order)
        width, left = max((right - left, -left) for left, right in pairwise(placed))
        order.append(-left + width // 2)
    return tuple(order)


def methods(order: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """The settings of `solve_schedule` for each method."""
    spread = halving_order(len(order))
    return {
        "order": {"placement": "order", "order": order, "decay": "constant"},  # the measured importance of layers
        "d3": {"placement": "ends", "decay": "exponential"},  # arXiv 2503.08524
        # Hierarchical Skip Decoding (arXiv 2403.14919): more layers are left out, evenly, as the sequence grows. It is
        # written from the paper's description; there is no code to compare it with.
        "hsd": {"placement": "order", "order": spread, "decay": "step"},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a model that is fine-tuned at full depth")
    parser.add_argument("--order", required=True, type=Path, metavar="FILE", help="from `skipdecode order`")
    parser.add_argument("--speedup", nargs="+", type=float, default=[1.5, 2, 3], metavar="X", help="of decoding")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="the task's folder; default: the recipe's")
    parser.add_argument("--batch-size", type=int, default=32, metavar="B", help="sequences at a time (default 32)")
    parser.add_argument("--limit", type=int, metavar="N", help="evaluate only the first N prompts of the test set")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder of the evaluation")
    options = parser.parse_args()
    config = AutoConfig.from_pretrained(options.checkpoint)
    schedules = []
    for name, settings in methods(read_order(options.order, config.num_hidden_layers)).items():
        for speedup in options.speedup:
            schedule = solve_schedule(config, speedup, horizon=32, batch_size=options.batch_size, **settings)
            schedules.append(options.output / f"{name}-{speedup:g}x.json")
            schedules[-1].parent.mkdir(parents=True, exist_ok=True)
            write_atomically(schedules[-1], schedule.to_json())
    words = ["--checkpoint", options.checkpoint, "--speedup", "1", "--schedule", *map(str, schedules)]
    words += ["--batch-size", str(options.batch_size), "--output", str(options.output)]
    for option, value in (("--data-dir", options.data_dir), ("--limit", options.limit)):
        words += [option, str(value)] if value is not None else []
    return eval.cli.main(words)


if __name__ == "__main__":
    sys.exit(run_command(main))
