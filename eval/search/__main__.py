"""`python -m eval.search`."""

import sys

from skipdecode.command import run_module

sys.exit(run_module("eval.search.cli"))
