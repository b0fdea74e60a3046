"""Runs that are killed again and again, by scripts/kill_and_resume.py: one process, and two under torchrun.

OMP_NUM_THREADS=1 python -m pytest tests/release/test_kill_and_resume.py
"""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_run_killed_at_random_moments_ends_as_the_uninterrupted_one(processes: str) -> None:
    command = [sys.executable, "scripts/kill_and_resume.py", "--kills", "3", "--processes", processes]
    result = subprocess.run([*command, "train.max_steps=24"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("3 kills in ")
