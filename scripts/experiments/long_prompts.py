"""Make long prompts from E2E: several records with their texts, and then the record to describe.

    python scripts/experiments/long_prompts.py E2E_FOLDER --output outputs/long
    python scripts/experiments/settings.py --settings schedule.prompt=full schedule.prompt=max --output outputs/both \\
        --over all --data-dir outputs/long data.task=cnndm data.max_prompt_tokens=480 ...

The files have the format of `cnndm`, with one text per record. Only the last record must be described, so a model
trained from scratch learns the task in minutes, but most of the time is spent on prompts. This shows what fewer layers
for prompts cost and save.
"""

import argparse
import csv
import random
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from skipdecode.cli.process import run_command
from skipdecode.errors import ConfigError

# The files of E2E for each split.
SPLITS = {"train": "trainset.csv", "validation": "devset.csv", "test": "testset_w_refs.csv"}
COLUMNS = ("article", "highlights")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("data_dir", type=Path, help=f"a folder with {', '.join(SPLITS.values())}")
    parser.add_argument("--records", type=int, default=4, metavar="N", help="records before the one to describe")
    parser.add_argument(
        "--train-rows", type=int, default=10_000, metavar="N", help="training rows, sampled from the training split"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument("--output", type=Path, required=True, help="folder for train.csv, validation.csv and test.csv")
    options = parser.parse_args()
    pairs = {split: read_pairs(options.data_dir / name) for split, name in SPLITS.items()}
    if not 1 <= options.records <= len(pairs["train"]):
        raise ConfigError(f"--records is {options.records}: it must lie between 1 and {len(pairs['train'])}")
    if options.train_rows < 1:
        raise ConfigError(f"--train-rows is {options.train_rows}: it must be at least 1")
    options.output.mkdir(parents=True, exist_ok=True)
    for split, own in pairs.items():
        generator = random.Random(options.seed)
        kept = generator.sample(own, min(options.train_rows, len(own))) if split == "train" else one_of_each(own)
        rows = [(with_records(record, pairs["train"], options.records, generator), text) for record, text in kept]
        with (options.output / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
        print(f"{split}: {len(rows)} rows")
    return 0


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """Pairs of record and text. Raises ConfigError for a missing file."""
    if not path.exists():
        raise ConfigError(f"{path} doesn't exist: expected a folder with {', '.join(SPLITS.values())}")
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [(row["mr"], row["ref"]) for row in csv.DictReader(file)]


def one_of_each(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The first text of each record."""
    first: dict[str, str] = {}
    for record, text in pairs:
        first.setdefault(record, text)
    return list(first.items())


def with_records(record: str, pairs: Sequence[tuple[str, str]], count: int, generator: random.Random) -> str:
    """A record after `count` other records with their texts, one per line."""
    described = [f"{other} = {text}" for other, text in generator.sample(pairs, count)]
    return "\n".join([*described, record])


if __name__ == "__main__":
    sys.exit(run_command(main))
