"""The time of one pass by its layers and tokens, from a calibrated profile or from the analytical cost model."""

import functools
from collections.abc import Callable
from typing import TypeAlias

from skipdecode.schedule.cost import CostModel
from skipdecode.schedule.machine_profile import Profile

# Layers and tokens of a pass -> seconds.
PassSeconds: TypeAlias = Callable[[int, int], float]


def pass_seconds(sizes: CostModel, profile: Profile | None, prompt_length: int) -> PassSeconds:
    """The time of a pass.

    A profile gives it for up to as many tokens as the largest batch that was timed. Beyond that, it grows at least as
    between the two largest batches, and as the analytical cost model predicts, which gives the time without a profile.
    """
    predicted = sizes.at(prompt_length=prompt_length)
    if profile is None:
        return functools.cache(lambda layers, tokens: predicted.step_seconds(layers, 0, tokens))
    batch_sizes = sorted({batch.batch_size for batch in profile.batches})
    largest = batch_sizes[-1]
    measured = profile.at(batch_size=largest, prompt_length=prompt_length)

    @functools.cache
    def seconds(layers: int, tokens: int) -> float:
        timed = min(tokens, largest)
        last = measured.step_seconds(layers, 0, timed)
        found = last * predicted.step_seconds(layers, 0, tokens) / predicted.step_seconds(layers, 0, timed)
        if tokens > timed and len(batch_sizes) > 1:
            per_token = (last - measured.step_seconds(layers, 0, batch_sizes[-2])) / (timed - batch_sizes[-2])
            found = max(found, last + per_token * (tokens - timed))
        return found

    return seconds
