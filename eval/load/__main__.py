"""`python -m eval.load`."""

import sys

from skipdecode.cli.process import run_module

sys.exit(run_module("eval.load.cli"))
