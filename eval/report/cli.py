"""The command line of the page: `python -m eval.report RUN... --output report.html`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skipdecode.cli.process import run_command

_DESCRIPTION = """\
Put finished evaluations of one task side by side, in one HTML page that needs nothing else: no script, no request.

The page holds
  frontiers    each metric against the measured speed, with confidence intervals and the quartiles of the speed
  rivals       what each run reaches at about the same measured speed, and p values against its own 1x row
  speed        targets, layers, measured speeds, prefill and decoding, cache, and the bound by bytes
  positions    which share of the predicted words stands in a reference, by their position in the text
  schedules    which layer runs for which generated token
  samples      predictions at every speed beside their references, differences to 1x marked
  versions     checkpoints, commands, machines, versions
Beside it are written the same figures as .json and the tables as .md.
"""

_EPILOG = """\
A RUN is the folder that `python -m eval --output FOLDER` wrote: report.json and predictions/.

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
    add("runs", nargs="+", metavar="RUN", help="FOLDER, or NAME=FOLDER; default name: the folder's or checkpoint's")
    page, benchmarks = "a .html that isn't there yet, nor its .md and .json", "JSON of python -m eval.speed"
    add("--output", required=True, type=Path, metavar="FILE", help=page)
    add("--speed", nargs="+", type=Path, default=[], metavar="FILE", help=f"benchmarks to show as well: {benchmarks}")
    add("--samples", type=int, default=12, metavar="N", help="prompts shown with texts (default 12)")
    options = vars(parser.parse_args(arguments))
    return run_command(lambda: _write(options), left=lambda: f"{options['output']} was not written")


def _write(options: dict[str, Any]) -> None:
    from eval.report.page import write_page  # here: it takes seconds, and a mistyped option should not

    write_page(**options)
