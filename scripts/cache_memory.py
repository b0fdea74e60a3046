"""The memory of the key/value cache over a long generation, measured, beside what the schedule planned (law 6).

    python scripts/cache_memory.py --shape opt-1.3b --dtype bfloat16 --speedup 1 2 3 4 5 --new-tokens 1024

Decodes random prompts with random weights and reads the bytes of the buffers that the cache holds at the end, which
were allocated at the start. Exits with 1 where they differ from the plan.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.progress import track

from configs.shapes import random_model, read_shape
from skipdecode import CostModel, SkipSchedule, skip_generate, solve_schedule
from skipdecode.command import run_command
from skipdecode.loop import GenerativeModel


def held_bytes(model: GenerativeModel, schedule: SkipSchedule, ids: torch.Tensor, new_tokens: int) -> int:
    """Count the bytes that the cache of a generation of `new_tokens` holds."""
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        custom_generate=skip_generate,
        schedule=schedule,
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
    )
    return int(output.past_key_values.nbytes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="opt-small", help="a name in configs/model/, or a YAML file")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--speedup", type=float, nargs="+", default=[1, 2, 3, 4, 5])
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps, shape = options.new_tokens - 1, (options.batch_size, options.prompt_length)
    model = random_model(read_shape(options.shape, "--shape"), getattr(torch, options.dtype)).to(device).eval()
    cost = CostModel.of(model)
    schedules = [
        solve_schedule(cost, speedup, horizon=steps, prompt_length=shape[1], batch_size=shape[0])
        for speedup in options.speedup
    ]
    ids = torch.randint(4, model.config.vocab_size, shape, device=device)
    held = [
        held_bytes(model, schedule, ids, options.new_tokens)
        for schedule in track(schedules, "generations", console=Console(stderr=True))
    ]
    full = cost.cache_bytes(SkipSchedule.full_depth(cost.num_layers), shape[1], steps, shape[0])
    plans = [cost.cache_bytes(schedule, shape[1], steps, shape[0]) for schedule in schedules]
    print("| target | layers | held, bytes | planned, bytes | of full depth |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for speedup, schedule, bytes_held, plan in zip(options.speedup, schedules, held, plans, strict=True):
        layers = f"{schedule.mean_budget(steps):.2f} of {cost.num_layers}"
        print(f"| {speedup:g}x | {layers} | {bytes_held:,} | {plan:,} | {bytes_held / full:.3f} |")
    return int(held != plans)


if __name__ == "__main__":
    sys.exit(run_command(main))
