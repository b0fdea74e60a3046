"""The command line of the comparison page: `python -m eval.report RUN... --output report.html`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skipdecode.cli.process import run_command

_DESCRIPTION = """\
Compare finished evaluations of one task on a single self-contained HTML page, without scripts or network requests.

The page contains
  frontiers    each metric against the measured speedup, with confidence intervals and quartiles of the speedup
  baselines    the scores of each run at about the same measured speedup, with p values against its 1x row
  speed        targets, layers, measured speedups, prefill and decode time, KV cache size, memory-bound speedup
  positions    the percentage of predicted words that occur in a reference, by their position in the output
  schedules    which layer runs for which generated token
  samples      predictions at every speed beside their references, with differences from 1x highlighted
  versions     checkpoints, commands, machines, package versions
The same figures are written beside it as .json, and the tables as .md.
"""

_EPILOG = """\
A RUN is the output folder of `python -m eval --output FOLDER`, with report.json and predictions/.

examples:
  python -m eval.report outputs/e2e-eval --output report.html
  python -m eval.report "every depth=outputs/e2e-eval" "1x only=outputs/full-eval" --speed speed.json --output both.html
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page. Returns the exit status, as `run_command` does."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.report",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        metavar="RUN",
        help="FOLDER, or NAME=FOLDER; default name: the folder's, or the checkpoint's for a folder named eval",
    )
    page, benchmarks = "a new .html file; .md and .json are written beside it", "JSON reports of python -m eval.speed"
    add("--output", required=True, type=Path, metavar="FILE", help=page)
    add("--speed", nargs="+", type=Path, default=[], metavar="FILE", help=f"benchmarks to include: {benchmarks}")
    add(
        "--samples",
        type=int,
        default=12,
        metavar="N",
        help="number of prompts shown with their predictions (default 12)",
    )
    options = vars(parser.parse_args(arguments))
    return run_command(lambda: _write(options), left=lambda: f"{options['output']} was not written")


def _write(options: dict[str, Any]) -> None:
    from eval.report.page import write_page  # imported here, after options are parsed: it takes seconds

    write_page(**options)
