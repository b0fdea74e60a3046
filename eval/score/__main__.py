"""`python -m eval.score`."""

import sys

from skipdecode.command import run_module

sys.exit(run_module("eval.score.cli"))
