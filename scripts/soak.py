"""Check that memory doesn't grow over thousands of generations of different shapes in one process.

    python scripts/soak.py --calls 2000

It prints the process's resident memory (on CUDA plus the device's), and exits with status 1 if the last tenth of the
calls uses over --allow megabytes more than the tenth after the warm-up. On CUDA the warm-up lasts until the cache of
graphs is full.
"""

import argparse
import gc
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch
from rich.console import Console
from rich.progress import track

from configs.shapes import random_model, read_shape
from skipdecode import SkipSchedule, skip_generate
from skipdecode.cli.process import run_command
from skipdecode.errors import ConfigError
from skipdecode.fastpath.cuda_graphs import MAX_KEPT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--shape", default="opt-tiny", help="a name in configs/model/, or a YAML file")
    parser.add_argument("--weights", choices=["model", "packed", "int8"], default="model")
    parser.add_argument(
        "--allow", type=float, default=8.0, metavar="MB", help="growth that is allowed as noise (default 8)"
    )
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tenth = max(1, options.calls // 10)
    warm = max(tenth, 2 * MAX_KEPT) if device == "cuda" else tenth
    if warm + 2 * tenth > options.calls:
        raise ConfigError(f"--calls is {options.calls}: it must be at least {warm} for the warm-up and two more tenths")
    shape = {"vocab_size": 512, **read_shape(options.shape, "--shape")}
    with torch.device(device):
        model = random_model(shape, torch.float32).eval()
    layers = model.config.num_hidden_layers
    draw = random.Random(0)
    process, held = psutil.Process(), []
    for _ in track(range(options.calls), "generations", console=Console(stderr=True)):
        rows, prompt, new = draw.randint(1, 16), draw.randint(1, 100), draw.randint(1, 24)
        budget = draw.randint(1, layers)
        schedule = SkipSchedule(layers, budget, draw.randint(1, budget), horizon=draw.randint(1, 32))
        ids = torch.randint(4, 512, (rows, prompt), device=device)
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            custom_generate=skip_generate,
            schedule=schedule,
            weights=options.weights,
            max_new_tokens=new,
            do_sample=draw.random() < 0.5,
        )
        memory = process.memory_info().rss + (torch.cuda.memory_reserved() if device == "cuda" else 0)
        held.append(memory / 1e6)
    gc.collect()
    early, late = statistics.median(held[warm : warm + tenth]), statistics.median(held[-tenth:])
    print(f"{options.calls} generations on {device}: {early:.1f} MB after the first {warm}, {late:.1f} MB at the end")
    return int(late - early > options.allow)


if __name__ == "__main__":
    sys.exit(run_command(main))
