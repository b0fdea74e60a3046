"""Train what SkipDecode is compared with, each a change of one recipe (docs/rivals.md).

    python scripts/experiments/train_rivals.py --recipe e2e-tiny --data-dir E2E_FOLDER --output outputs/rivals

Each goes into a folder of its name, a finished run like any other, with a log beside it. What is finished is not run
again, and what was cut off goes on: start it again after a stop. Runs are independent: two at a time with
OMP_NUM_THREADS=1 take half as long on two cores (--jobs 2). It ends with a table of what each computes: all train on
the same rows for as many steps, but not with as much work. What can't reach the recipe's targets is named and left out;
--only NAME schedule.speedup_range=[1,3.5] trains it for others.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.experiments.rivals import RIVALS
from scripts.experiments.variants import Variants, run_jobs
from skipdecode.command import run_command
from skipdecode.errors import ConfigError, unknown


def main() -> int:
    names = "\n".join(f"  {name:<24}{rival.what}" for name, rival in RIVALS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"rivals:\n{names}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="e2e-tiny", help="a recipe or a YAML file (default e2e-tiny)")
    parser.add_argument("--data-dir", type=Path, help="the task's folder; default: the recipe's, the Hub, or built in")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="a folder for all of them")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for all of them")
    options = parser.parse_intermixed_args()
    given = options.only or []
    options.overrides += [word for word in given if "=" in word]  # those that follow the names
    options.only = [word for word in given if "=" not in word]
    return train(options)


def train(options: argparse.Namespace) -> int:
    """Train those asked for and print their table."""
    if options.jobs < 1:
        raise ConfigError(f"--jobs is {options.jobs}: it must be at least 1")
    names = options.only or list(RIVALS)
    for name in names:
        if name not in RIVALS:
            raise unknown("rival", name, list(RIVALS))
    common = ["tracking.wandb=off", *options.overrides]
    if options.data_dir is not None:
        common.insert(0, f"data.path={options.data_dir.resolve()}")
    variants = Variants(options.recipe, tuple(common))
    overrides, samplers = {}, {}
    for name in names:  # refused before the first run
        try:
            overrides[name] = RIVALS[name].resolve(variants)
            samplers[name] = variants.sampler(overrides[name])
        except ConfigError as error:
            if options.only:
                raise
            print(f"{name} is left out: {error}", file=sys.stderr)
    names = list(samplers)
    options.output.mkdir(parents=True, exist_ok=True)
    jobs = {
        name: partial(variants.train, overrides[name], options.output / name, options.output / f"{name}.log")
        for name in names
    }
    failed = run_jobs(jobs, options.jobs)
    whole = variants.work()
    print("| name | what | layers | work |")
    print("| --- | --- | ---: | ---: |")
    for name in names:
        layers = samplers[name].schedules[0].num_layers
        work = "failed" if name in failed else f"{variants.work(overrides[name]) / whole:.2f}"
        print(f"| {name} | {RIVALS[name].what} | {layers} | {work} |")
    print("\nWork: passes of a column through a layer, over the recipe's own; the LM head isn't counted.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
