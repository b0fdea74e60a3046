"""`python -m eval.load`."""

import sys

from skipdecode.command import run_module

sys.exit(run_module("eval.load.cli"))
