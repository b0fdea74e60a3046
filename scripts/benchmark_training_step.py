"""Measure the time of a training step under a schedule relative to full depth, and the share of computed positions.

    python scripts/benchmark_training_step.py --shape opt-tiny --speedup 2 3 4

Weights and tokens are random; the step is forward, loss and backward, without the optimiser. In each repeat the
schedules take turns with full depth, so that a drifting machine speed affects all alike; ratios are medians over
repeats [quartiles].
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.progress import track

from configs.shapes import random_model, read_shape
from eval.tables import Table
from skipdecode import CostModel, SkipSchedule, skip_layers, solve_schedule
from skipdecode.cli.process import run_command
from skipdecode.training.batch_layout import lay_out
from skipdecode.training.objective import completion_loss, predicting_budgets, unpack_batch


def step_seconds(model: torch.nn.Module, batch: dict, schedule: SkipSchedule) -> float:
    """The time of forward, loss and backward of one batch under a schedule."""
    prompt_columns, columns, labels = unpack_batch(batch)
    on_cuda = labels.device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    with skip_layers(model, schedule, prompt_columns=prompt_columns):
        logits = model(**columns).logits
    budgets = predicting_budgets(schedule, labels.shape[1])
    completion_loss(logits[:, :-1], labels, budgets, num_layers=schedule.num_layers).backward()
    model.zero_grad(set_to_none=True)
    if on_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="opt-tiny", help="a name in configs/model/, or a YAML file")
    parser.add_argument("--layers", type=int, help="number of layers, instead of the shape's")
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--speedup", type=float, nargs="+", default=[2, 3, 4])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--prompt-length", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    shape = {"vocab_size": options.vocab_size, **read_shape(options.shape, "--shape")}
    if options.layers:
        shape["num_hidden_layers"] = options.layers
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = random_model(shape, getattr(torch, options.dtype)).train()
    cost = CostModel.of(model)
    schedules = [solve_schedule(cost, speedup, horizon=options.new_tokens) for speedup in options.speedup]
    full = SkipSchedule.full_depth(cost.num_layers, options.new_tokens)

    def ids(length: int) -> list[list[int]]:
        return torch.randint(4, options.vocab_size, (options.batch_size, length)).tolist()

    batch = lay_out(ids(options.prompt_length), ids(options.new_tokens), pad_token=1)
    batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    ratios: list[list[float]] = [[] for _ in schedules]
    for repeat in track(range(options.repeats + 2), "steps", console=Console(stderr=True)):
        base = step_seconds(model, batch, full)
        for number, schedule in enumerate(schedules):
            ratio = step_seconds(model, batch, schedule) / base
            if repeat >= 2:  # the first two repeats warm up
                ratios[number].append(ratio)

    rows = []
    for speedup, schedule, found in zip(options.speedup, schedules, ratios, strict=True):
        low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
        share = schedule.computed_share(options.prompt_length, options.prompt_length + options.new_tokens)
        mean = schedule.mean_budget(options.new_tokens)
        rows.append((f"{speedup:g}x", f"{mean:.2f}", f"{share:.3f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}"))
    title = f"training step, {options.shape}, batch {options.batch_size}, {options.dtype}, {device}"
    headers = ("target", "mean layers", "share of positions computed", "relative step time", "quartiles")
    Console().print(Table(headers, rows, title).to_rich())
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
