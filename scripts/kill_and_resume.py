"""Kill a run at random moments, resume it with the same command, and compare its end with an uninterrupted run.

    python scripts/kill_and_resume.py --kills 20 --processes 1
    python scripts/kill_and_resume.py --kills 20 --processes 2 train.max_steps=80

With one process the weights must be bitwise equal, with several equal within 1e-5, because sums over ranks may be
ordered differently. Every step must be logged exactly once, with the same loss. Then the exit status is 0, else 1.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file

from skipdecode.cli.process import run_command
from skipdecode.files import read_lines

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    "model.config.num_hidden_layers=8",
    "model.config.hidden_size=48",
    "model.config.word_embed_proj_dim=48",
    "model.config.ffn_dim=192",
    "model.vocab_size=320",
    "data.options={train_size: 60, validation_size: 8, test_size: 4}",
    "train.per_device_batch_size=8",
    "train.max_steps=60",
    "train.logging_steps=1",
    "train.save_steps=4",
    "train.validate_rows=8",
    "tracking.wandb=off",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, metavar="N")
    parser.add_argument(
        "--processes", type=int, default=1, metavar="P", help="number of processes; above 1, under torchrun"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--recipe", default="quickstart", help="a recipe, made small by the overrides in this file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        straight, killed = Path(folder, "straight"), Path(folder, "killed")
        start = time.perf_counter()
        _, output = (first := launch(options, straight)).communicate()
        if first.returncode != 0:
            raise SystemExit(f"the uninterrupted run ended with status {first.returncode}:\n{output}")
        seconds = time.perf_counter() - start
        console.print(f"the uninterrupted run took {seconds:.0f} s")
        moments = random.Random(options.seed)
        kills, runs, worst = 0, 0, 0.0
        differing: list[str] = []
        with Progress(console=console) as progress:
            bar = progress.add_task("kills", total=options.kills)
            while kills < options.kills:
                shutil.rmtree(killed, ignore_errors=True)
                for _ in killings(options, killed, seconds, moments, options.kills - kills):
                    kills += 1
                    progress.advance(bar)
                runs += 1
                worst = max(worst, largest_difference(straight, killed))
                differing += [f"run {runs}, step {step}" for step in differing_steps(straight, killed)[:1]]
    print(
        f"{kills} kills in {runs} run(s) of {options.processes} process(es): "
        f"weights differ by at most {worst}, logs first differ at: {'; '.join(differing) or 'no step'}"
    )
    return int(bool(differing) or worst > (0 if options.processes == 1 else 1e-5))


def launch(options: argparse.Namespace, folder: Path) -> subprocess.Popen[str]:
    launcher = [sys.executable]
    if options.processes > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc_per_node", str(options.processes)]
        launcher += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    command = [*launcher, "train.py", "--recipe", options.recipe, *SMALL, *options.overrides, f"output.dir={folder}"]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def killings(
    options: argparse.Namespace, folder: Path, seconds: float, moments: random.Random, max_kills: int
) -> Iterator[None]:
    """Start a run until it finishes, killing it at most `max_kills` times; yields after each kill."""
    for kill in itertools.count():
        run = launch(options, folder)
        try:
            # Some kills hit the start, but most hit training and its checkpoints.
            _, output = run.communicate(timeout=moments.uniform(0, seconds) if kill < max_kills else None)
        except subprocess.TimeoutExpired:
            kill_tree(run.pid)
            run.communicate()
            yield
            if (folder / "config.json").exists():  # the last file of a finished run; only its exit was missing
                return
            continue
        if run.returncode != 0:
            raise SystemExit(f"the run ended with status {run.returncode}:\n{output}")
        return


def kill_tree(pid: int) -> None:
    """Send SIGKILL to a launcher and its workers, which are in sessions of their own."""
    launcher = psutil.Process(pid)
    launcher.suspend()  # it would restart the workers
    for process in [*launcher.children(recursive=True), launcher]:
        process.kill()


def largest_difference(one: Path, other: Path) -> float:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours) if ours else torch.inf


def differing_steps(one: Path, other: Path) -> list[int]:
    """Steps (1-based) that are missing, logged twice or have another loss in one of the logs."""
    ours, theirs = (losses(folder) for folder in (one, other))
    return sorted(step for step, _ in (ours - theirs) + (theirs - ours))


def losses(folder: Path) -> Counter[tuple[int, float]]:
    lines = map(json.loads, read_lines(folder / "metrics.jsonl"))
    return Counter((line["step"], line["loss"]) for line in lines)


if __name__ == "__main__":
    sys.exit(run_command(main))
