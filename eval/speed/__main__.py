"""`python -m eval.speed`."""

import sys

from skipdecode.cli.process import run_module

sys.exit(run_module("eval.speed.cli"))
