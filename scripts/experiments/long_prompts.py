"""Make long prompts of E2E's rows: some records with their texts, then the record that is to be told.

    python scripts/experiments/long_prompts.py E2E_FOLDER --output outputs/long
    python scripts/experiments/settings.py --settings schedule.prompt=full schedule.prompt=max --output outputs/both \\
        --over all --data-dir outputs/long data.task=cnndm data.max_prompt_tokens=480 ...

The files are of the form of `cnndm`, one text a record. What is to be told is in the last record alone, so a model from
scratch learns it in minutes, and yet most of the time goes into prompts: what fewer layers for them cost and save.
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

# The files of E2E, and of the splits that are made of them.
SPLITS = {"train": "trainset.csv", "validation": "devset.csv", "test": "testset_w_refs.csv"}
COLUMNS = ("article", "highlights")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("data_dir", type=Path, help=f"a folder with {', '.join(SPLITS.values())}")
    parser.add_argument("--records", type=int, default=4, metavar="N", help="before the one that is to be told")
    parser.add_argument("--train-rows", type=int, default=10_000, metavar="N", help="drawn from the training split")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--output", type=Path, required=True, help="folder for train.csv, validation.csv and test.csv")
    options = parser.parse_args()
    pairs = {split: read_pairs(options.data_dir / name) for split, name in SPLITS.items()}
    if not 1 <= options.records <= len(pairs["train"]):
        raise ConfigError(f"--records is {options.records}: expected 1 to {len(pairs['train'])}, those to draw from")
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
    """Records and their texts. Raises ConfigError where there is no such file."""
    if not path.exists():
        raise ConfigError(f"{path} isn't there: expected a folder with {', '.join(SPLITS.values())}")
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [(row["mr"], row["ref"]) for row in csv.DictReader(file)]


def one_of_each(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The first text of each record."""
    first: dict[str, str] = {}
    for record, text in pairs:
        first.setdefault(record, text)
    return list(first.items())


def with_records(record: str, pairs: Sequence[tuple[str, str]], count: int, generator: random.Random) -> str:
    """A record below so many others with their texts, a line each."""
    told = [f"{other} = {text}" for other, text in generator.sample(pairs, count)]
    return "\n".join([*told, record])


if __name__ == "__main__":
    sys.exit(run_command(main))
