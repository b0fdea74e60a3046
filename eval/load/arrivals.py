"""Arrival times and prompts of requests: pure functions of a seed."""

import math
import random
from collections.abc import Sequence
from itertools import accumulate


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Arrival times of `count` requests in seconds, ascending: a Poisson process that starts with a request at 0.

    Args:
        rate: requests per second; infinite: all arrive at once.
        count: the number of requests.
        seed: the seed of the process.

    >>> [round(at, 2) for at in poisson_arrivals(2.0, 4, seed=0)]
    [0.0, 0.99, 1.31, 2.58]
    >>> poisson_arrivals(float("inf"), 2, seed=0)
    [0.0, 0.0]
    """
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(f"arrivals {seed}")
    return list(accumulate((draw.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def drawn_prompts(prompts: Sequence[str], count: int, seed: int) -> list[str]:
    """`count` prompts in random order; every prompt is used once before any is used again."""
    draw = random.Random(f"prompts {seed}")
    found: list[str] = []
    while len(found) < count:
        found += draw.sample(prompts, min(len(prompts), count - len(found)))
    return found
