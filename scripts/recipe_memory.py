"""Estimate the GPU memory that every recipe needs on 1, 2, 4 and 8 GPUs: the table of recipes/README.md.

    python scripts/recipe_memory.py                  # or: --recipe e2e-opt-1.3b tldr-opt-6.7b --gpus 1 2 16

The recipe's model runs a training step on tensors without data, with the longest batch that the task's limits allow and
under the schedules that need the most memory (train/dry_run/memory.py). Nothing is downloaded, and no GPU is needed.
"""

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from skipdecode import CostModel
from skipdecode.cli.process import run_command
from train.build import build_task, model_config
from train.dry_run.memory import MemoryEstimate, estimate_memory, heaviest_step
from train.prepare import recipe_sampler
from train.recipe import load_recipe, recipe_names

GIB = 2**30


def row(name: str, gpus: list[int], overrides: list[str]) -> str:
    """A recipe's row of the table."""
    folder = ["data.path=."] if name in ("text", "chat-smollm2-135m") else []  # not read, but needed by these tasks
    recipe = load_recipe(name, [*folder, *overrides])
    task = build_task(recipe)
    config = model_config(recipe)
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    sampler, _ = recipe_sampler(recipe, task, CostModel.of(config, dtype))
    _, simulated = heaviest_step(
        recipe,
        config,
        sampler,
        prompt_columns=recipe.data.max_prompt_tokens or task.max_prompt_tokens,
        new_tokens=recipe.data.max_completion_tokens or task.max_new_tokens,
    )
    estimates = [estimate_memory(recipe, simulated, count) for count in gpus]
    model = (recipe.model.name_or_path or f"{recipe.model.shape}, random").rpartition("/")[2]
    base = " on 4 bits" if recipe.model.quantize is not None else ""
    trained = f"adapters{base}" if recipe.lora.r is not None else "all weights"
    speeds = [f"{speedup:g}x" for speedup in sampler.speedups]
    cells = [
        f"[`{name}`]({name}.yaml)",
        f"{model}, {trained}",
        task.name,
        f"{speeds[0]} to {speeds[-1]}" if recipe.schedule.speedup_range else ", ".join(speeds),
        recipe.deepspeed.config or "none",
        *(cell(estimate) for estimate in estimates),
    ]
    return f"| {' | '.join(cells)} |"


def cell(estimate: MemoryEstimate) -> str:
    """GiB of GPU memory, and of main memory where DeepSpeed offloads to it."""
    host = f" + {estimate.host / GIB:.0f} of main memory" if estimate.host else ""
    return f"{estimate.total / GIB:.1f}{host}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", default=recipe_names(), help="recipes (default: all)")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of GPUs, in one machine")
    parser.add_argument(
        "--deepspeed", metavar="CONFIG", help="a DeepSpeed config for all recipes, such as zero3-offload"
    )
    options = parser.parse_args()
    overrides = [f"deepspeed.config={options.deepspeed}"] if options.deepspeed else []
    counts = [f"{count} GPU{'s' if count > 1 else ''}" for count in options.gpus]
    warnings.simplefilter("ignore", FutureWarning)  # from transformers, about peft
    print(f"| recipe | model | task | speeds | DeepSpeed | {' | '.join(counts)} |")
    print(f"| --- | --- | --- | --- | --- |{' ---: |' * len(counts)}")
    for name in options.recipe:
        print(row(name, options.gpus, overrides), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
