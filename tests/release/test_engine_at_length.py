"""Cached = uncached (law 5) for a thousand random requests to an engine, different ones in each run.

OMP_NUM_THREADS=1 python -m pytest tests/release/test_engine_at_length.py
"""

import random

import pytest
import torch
from engine_cases import FAMILIES, play


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_each_of_a_thousand_batched_requests_gives_the_tokens_of_its_prompt_alone(
    name: str, dtype: torch.dtype
) -> None:
    seed = random.getrandbits(32)
    print(f"seed {seed}")
    assert play(name, dtype, 1000, seed, most_waiting=1000, wave_tokens=8 + seed % 60) > 0
