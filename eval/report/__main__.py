"""`python -m eval.report`."""

import sys

from skipdecode.command import run_module

sys.exit(run_module("eval.report.cli"))
