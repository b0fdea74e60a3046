"""Run tests/release/test_bad_input.py, which tries bad inputs and faults; options are passed on to pytest.

python scripts/try_bad_input.py                   # or: -n 2, -k weights
"""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main([str(Path(__file__).parent.parent / "tests/release/test_bad_input.py"), *sys.argv[1:]]))
