"""Training's entry for python and torchrun: `torchrun train.py --recipe NAME [key=value …]`."""

import sys

from skipdecode.cli.process import run_module

if __name__ == "__main__":
    sys.exit(run_module("train.cli"))
