"""`python -m eval.report`."""

import sys

from skipdecode.cli.process import run_module

sys.exit(run_module("eval.report.cli"))
