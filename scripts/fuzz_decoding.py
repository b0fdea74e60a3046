"""Decode thousands of cases drawn at random and hold every token against a reference without cache, batch and padding.

    python scripts/fuzz_decoding.py --cases 20000
    python scripts/fuzz_decoding.py --threads --cases 1000    # calls of two threads, then of three, on one model
    python scripts/fuzz_decoding.py --case '{"model": ...}'   # one that failed, again

Cases and reference are those of tests/library/test_any_case_of_decoding.py. A case that fails is made as small as
it can be and printed; the exit status is 1 then, else 0.
"""

import argparse
import json
import math
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import hypothesis
from decoding_cases import MODELS, Case, cases, run_case
from decoding_threads import FAST, SLOW, decode_side_by_side
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils import logging

AT_ONCE = 1000  # cases of one seed: what hypothesis remembers of them stays small


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", action="store_true", help="calls of threads on one model instead")
    parser.add_argument("--case", metavar="JSON", help="one case, as it was printed")
    options = parser.parse_args()
    if options.cases < 1:
        parser.error(f"--cases is {options.cases}: it must be at least 1")
    logging.set_verbosity_error()
    if options.case is not None:
        print(f"right; {run_case(Case.from_dict(json.loads(options.case)))} near ties")
        return 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        return (fuzz_threads if options.threads else fuzz)(options.cases, random.Random(options.seed), progress)


def fuzz(count: int, draw: random.Random, progress: Progress) -> int:
    bar = progress.add_task("cases", total=count)
    last: list[Case] = []
    ties = 0

    def right(case: Case) -> None:
        nonlocal ties
        last[:] = [case]
        ties += run_case(case)
        progress.advance(bar)

    for done in range(0, count, AT_ONCE):
        settings = hypothesis.settings(
            max_examples=min(AT_ONCE, count - done),
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        try:
            hypothesis.seed(draw.getrandbits(32))(settings(hypothesis.given(cases())(right)))()
        except Exception as error:
            progress.stop()
            print(f"wrong: {type(error).__name__}: {error}\nafter about {done} cases; again: --case '", end="")
            print(json.dumps(last[0].to_dict()) + "'")
            return 1
    progress.stop()
    print(f"{count} cases right; {ties} tokens differ in a near tie")
    return 0


def fuzz_threads(count: int, draw: random.Random, progress: Progress) -> int:
    bar = progress.add_task("calls", total=count)
    rounds = [(name, schedules) for schedules in ([FAST, SLOW], [FAST, SLOW, None]) for name in MODELS]
    calls = 0
    for number, (name, schedules) in enumerate(rounds):
        share = math.ceil((count - calls) / (len(rounds) - number) / len(schedules)) * len(
            schedules
        )  # at least `count`
        seed = draw.getrandbits(32)
        try:
            decode_side_by_side(name, share, seed, schedules)
        except AssertionError as error:
            progress.stop()
            print(f"wrong: {error}\nmodel {name!r}, {len(schedules)} threads, {share} calls, seed {seed}")
            return 1
        calls += share
        progress.update(bar, completed=calls)
    progress.stop()
    print(f"{calls} calls in threads right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
