"""Measure what is left of a training step's time under a schedule, beside what is left of its work.

    python scripts/benchmark_training_step.py --shape opt-tiny --speedup 2 3 4

Weights and tokens are random, and made on the device; the step is forward, loss and backward, without the optimiser. In
each repeat the schedules take turns with full depth, so that a drifting machine speed affects all alike; ratios to full
depth are medians over repeats [quartiles]. Work is counted by parameters: each layer's at the positions that run it,
and the LM head's at those that predict.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.progress import track

from eval.tables import Table
from scripts.random_models import DEVICE, make_model, seconds
from skipdecode import CostModel, SkipSchedule, solve_schedule
from skipdecode.cli.process import run_command
from skipdecode.training import step_loss
from skipdecode.training.batch_layout import lay_out


def step_work(cost: CostModel, layers_share: float, prompt_length: int, new_tokens: int) -> float:
    """The multiplications of a row's forward pass, but for the attention's scores."""
    in_layers = cost.layer_parameters * cost.num_layers * layers_share * (prompt_length + new_tokens)
    return in_layers + cost.head_parameters * (new_tokens + 1)


def step_seconds(model: torch.nn.Module, batch: dict, schedule: SkipSchedule) -> float:
    """The time of forward, loss and backward of one batch under a schedule."""

    def step() -> None:
        step_loss(model, batch, [schedule]).backward()
        model.zero_grad(set_to_none=True)

    return seconds(step)


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
    torch.manual_seed(0)
    model = make_model(options, **({"num_hidden_layers": options.layers} if options.layers else {})).train()
    cost = CostModel.of(model)
    schedules = [solve_schedule(cost, speedup, horizon=options.new_tokens) for speedup in options.speedup]
    full = SkipSchedule.full_depth(cost.num_layers, options.new_tokens)

    def ids(length: int) -> list[list[int]]:
        return torch.randint(4, options.vocab_size, (options.batch_size, length)).tolist()

    batch = lay_out(ids(options.prompt_length), ids(options.new_tokens), pad_token=1)
    batch = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    ratios: list[list[float]] = [[] for _ in schedules]
    for repeat in track(range(options.repeats + 2), "steps", console=Console(stderr=True)):
        base = step_seconds(model, batch, full)
        for number, schedule in enumerate(schedules):
            ratio = step_seconds(model, batch, schedule) / base
            if repeat >= 2:  # the first two repeats warm up
                ratios[number].append(ratio)

    rows, lengths = [], (options.prompt_length, options.new_tokens)
    for speedup, schedule, found in zip(options.speedup, schedules, ratios, strict=True):
        low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
        share = schedule.computed_share(options.prompt_length, options.prompt_length + options.new_tokens)
        work = step_work(cost, share, *lengths) / step_work(cost, 1, *lengths)
        mean = schedule.mean_budget(options.new_tokens)
        left = (f"{share:.3f}", f"{work:.3f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
        rows.append((f"{speedup:g}x", f"{mean:.2f}", *left))
    title = f"training step, {options.shape}, batch {options.batch_size}, {options.dtype}, {DEVICE}"
    headers = ("target", "mean layers", "layer positions left", "work left", "step time left", "quartiles")
    Console().print(Table(headers, rows, title).to_rich())
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
