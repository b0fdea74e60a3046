"""Training's entry for python and torchrun: `torchrun train.py --recipe NAME [key=value …]`."""

import sys

from train.cli import main

if __name__ == "__main__":
    sys.exit(main())
