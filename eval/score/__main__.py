"""`python -m eval.score`."""

import sys

from skipdecode.cli.process import run_module

sys.exit(run_module("eval.score.cli"))
