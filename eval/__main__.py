"""`python -m eval`."""

import sys

from skipdecode.cli.process import run_module

sys.exit(run_module("eval.cli"))
