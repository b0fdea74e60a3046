"""Check that training steps don't depend on how processes share them: a short run is divided in six ways.

    python scripts/compare_processes.py --data-dir E2E_FOLDER
    python scripts/compare_processes.py --data-dir E2E_FOLDER schedule.sampling=sandwich optim.distillation=0.5 \\
        optim.depth_weight_power=1 schedule.decay=linear

The rows of a step are one batch of one process, two accumulated batches, or one batch on each of two processes: with
plain DDP, or with DeepSpeed at stages 1, 2 and 3 (pip install 'skipdecode[deepspeed]'). Each way trains e2e-tiny with
the same recipe, on CPU or GPUs, one after the other; this takes a few minutes on two cores.

The table shows, for each way, its largest difference in any step from any other way: in the loss, in the gradient norm
(relative), in the loss of a band of depth and in the validation losses. If steps have the same rows and the same
divisors, only rounding differs; a single other row in a step makes a difference of 1e-3 or more. The exit status is 1
if a loss differs by more than --within (1e-4), else 0.

The learning rate is 1e-5, because AdamW moves a weight whose gradient is only rounding as far as any other: at
e2e-tiny's own 3e-3, rounding errors in a loss grow to 1e-3 in 40 steps. Dropout must be off, as in e2e-tiny, because
each process has its own random numbers. In bf16, rounding errors are much larger than 1e-4.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.progress import track

from skipdecode import ConfigError
from skipdecode.cli.process import run_command
from skipdecode.files import read_lines

ROOT = Path(__file__).resolve().parent.parent
# Number of processes, number of accumulated batches, and DeepSpeed config.
WAYS = {
    "1 process": (1, 1, None),
    "1 process, 2 parts": (1, 2, None),
    "2 processes": (2, 1, None),
    "2 processes, ZeRO-1": (2, 1, "zero1"),
    "2 processes, ZeRO-2": (2, 1, "zero2"),
    "2 processes, ZeRO-3": (2, 1, "zero3"),
}
FIGURES: dict[str, tuple[str, Callable[[str], bool]]] = {
    "loss": ("metrics.jsonl", lambda name: name == "loss"),
    "gradient norm": ("metrics.jsonl", lambda name: name == "grad_norm"),
    "loss by depth": ("metrics.jsonl", lambda name: name.startswith("loss_layers")),
    "validation": ("validation.jsonl", lambda name: name.startswith("eval_loss")),
}
Steps = dict[tuple[int, str], float]  # (step, metric) -> value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data-dir", required=True, type=Path, metavar="FOLDER", help="E2E's CSV files")
    add("--steps", type=int, default=40, metavar="N", help="optimiser steps (default 40)")
    add("--rows", type=int, default=16, metavar="N", help="rows per step, an even number (default 16)")
    add("--within", type=float, default=1e-4, metavar="LOSS", help="largest allowed difference (default 1e-4)")
    add("--only", nargs="+", choices=WAYS, metavar="WAY", help=f"some of {', '.join(WAYS)} (default: all)")
    add("overrides", nargs="*", metavar="key=value", help="overrides of the recipe for all of them")
    options = parser.parse_intermixed_args()
    if options.steps < 1 or options.rows < 2 or options.rows % 2:
        raise ConfigError(
            f"--steps is {options.steps} and --rows is {options.rows}: expected at least 1, and an even number"
        )
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in track(options.only or list(WAYS), "ways", console=Console(stderr=True)):
            train(options, way, Path(folder, way))
            found[way] = {figure: read(Path(folder, way), figure) for figure in FIGURES}
    print(f"| {options.rows} rows per step, {options.steps} steps | " + " | ".join(FIGURES) + " |")
    print("| --- |" + " ---: |" * len(FIGURES))
    worst = 0.0
    for way in found:
        apart = {figure: difference(figure, way, found) for figure in FIGURES}
        print(f"| {way} | " + " | ".join(f"{value:.1e}" for value in apart.values()) + " |")
        worst = max(worst, *(value for figure, value in apart.items() if figure != "gradient norm"))
    print(f"losses differ by at most {worst:.1e}; allowed: {options.within:.1e}")
    return int(not worst <= options.within)


def train(options: argparse.Namespace, way: str, folder: Path) -> None:
    """Train in one way. Raises ConfigError with the run's error message if it fails."""
    processes, parts, deepspeed = WAYS[way]
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--rdzv_backend", "c10d"]
    launcher += ["--rdzv_endpoint", "localhost:0"]
    recipe = [
        f"data.path={options.data_dir.resolve()}",
        f"train.max_steps={options.steps}",
        f"train.save_steps={options.steps}",
        "train.logging_steps=1",
        "train.validate_rows=37",  # the last batch is incomplete in every way
        "optim.learning_rate=1e-5",
        "tracking.wandb=off",
        *options.overrides,
        f"train.per_device_batch_size={options.rows // processes // parts}",
        f"train.gradient_accumulation_steps={parts}",
        f"deepspeed.config={deepspeed or 'null'}",
        f"output.dir={folder}",
    ]
    command = [sys.executable, *(launcher if processes > 1 else []), "train.py", "--recipe", "e2e-tiny", *recipe]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        lines = result.stderr.splitlines()
        line = next((line for line in reversed(lines) if line.startswith(("error:", "stopped:"))), lines[-1])
        raise ConfigError(f"{way} ended with status {result.returncode}: {line.removeprefix('error: ')}")


def read(folder: Path, figure: str) -> Steps:
    file, belongs = FIGURES[figure]
    lines: list[dict[str, Any]] = [json.loads(line) for line in read_lines(folder / file)]
    return {(line["step"], name): value for line in lines for name, value in line.items() if belongs(name)}


def difference(figure: str, way: str, found: dict[str, dict[str, Steps]]) -> float:
    """The largest difference from any other way; infinite if their steps differ or a value isn't finite."""
    mine, largest = found[way][figure], 0.0
    for other in (steps[figure] for steps in found.values()):
        if mine.keys() != other.keys():
            return float("inf")
        for at, value in mine.items():
            if not math.isfinite(value) or not math.isfinite(other[at]):
                return float("inf")
            scale = max(value, other[at]) if figure == "gradient norm" else 1.0
            largest = max(largest, abs(value - other[at]) / (scale or 1.0))
    return largest


if __name__ == "__main__":
    sys.exit(run_command(main))
