"""Cut articles into windows, each with what follows it: many long prompts of the form of `cnndm` from few rows.

    python scripts/experiments/article_windows.py CNNDM.csv --output outputs/windows
    python train.py --recipe quickstart data.task=cnndm data.path=outputs/windows ...

What is learnt is to go on with an article, not to summarise it: enough to see what a prompt of fewer layers costs.
Validation and test have articles of their own.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from skipdecode.command import run_command
from skipdecode.errors import ConfigError

COLUMNS = ("article", "highlights")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("articles", type=Path, help="a CSV file with a column `article`")
    parser.add_argument("--words", type=int, default=230, metavar="N", help="of a window")
    parser.add_argument("--following", type=int, default=25, metavar="N", help="words that follow it, and the stride")
    parser.add_argument("--held-out", type=int, default=15, metavar="N", help="articles for validation, and for test")
    parser.add_argument("--output", type=Path, required=True, help="folder for train.csv, validation.csv and test.csv")
    options = parser.parse_args()
    with options.articles.open(encoding="utf-8", newline="") as file:
        articles = [row["article"] for row in csv.DictReader(file)]
    held_out = options.held_out
    if len(articles) <= 2 * held_out:
        raise ConfigError(f"--held-out is {held_out}: {options.articles} has {len(articles)} articles")
    parts = {
        "train": articles[: -2 * held_out],
        "validation": articles[-2 * held_out : -held_out],
        "test": articles[-held_out:],
    }
    options.output.mkdir(parents=True, exist_ok=True)
    for split, texts in parts.items():
        rows = [pair for text in texts for pair in windows(text.split(), options.words, options.following)]
        with (options.output / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([COLUMNS, *rows])
        print(f"{split}: {len(rows)} windows of {len(texts)} articles")
    return 0


def windows(words: list[str], size: int, following: int) -> Iterator[tuple[str, str]]:
    """Windows of so many words, each with as many as follow it, which the next window ends with."""
    for start in range(0, len(words) - size - following + 1, following):
        end = start + size
        yield " ".join(words[start:end]), " ".join(words[end : end + following])


if __name__ == "__main__":
    sys.exit(run_command(main))
