"""`python -m eval.search`."""

import sys

from skipdecode.cli.process import run_module

sys.exit(run_module("eval.search.cli"))
