"""`python -m eval.speed`."""

import sys

from skipdecode.command import run_module

sys.exit(run_module("eval.speed.cli"))
