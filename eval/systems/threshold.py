"""Calibrate the threshold of confidence exits on validation prompts to the mean layers of a schedule."""

from collections.abc import Callable, Sequence

from eval.journal import Journal
from eval.results import Threshold
from eval.systems.base import Checkpoint
from eval.systems.calm import CalmSystem

PROMPTS = 60  # maximum number of validation prompts
BATCH_SIZE = 32
PROBES = 12  # maximum number of thresholds tried per target
TOLERANCE = 0.05  # layers per token below the wanted number


def calibrated_threshold(
    checkpoint: Checkpoint,
    prompts: Sequence[list[int]],
    wanted_layers: float,
    *,
    max_new_tokens: int,
    journal: Journal,
    advance: Callable[[], None],
) -> Threshold:
    """The threshold at which tokens run `wanted_layers` on average, or slightly fewer.

    Args:
        checkpoint: the model.
        prompts: token ids of validation prompts.
        wanted_layers: mean layers per token, at least 1.
        max_new_tokens: the maximum number of generated tokens per prompt.
        journal: stores the mean layers of each threshold tried.
        advance: called after each probe.
    """

    def mean_layers(threshold: float) -> float:
        key = ("calm", repr(threshold))
        found = journal.get_or_add(key, lambda: _mean_layers(checkpoint, prompts, threshold, max_new_tokens))
        advance()
        return float(found)

    value, found = largest_below(mean_layers, wanted_layers)
    return Threshold(value, wanted_layers, found, len(prompts))


def largest_below(mean_layers: Callable[[float], float], wanted: float) -> tuple[float, float]:
    """By bisection, the threshold with the most layers per token up to `wanted`, and that number of layers.

    The search stops within TOLERANCE. Its scale is finer near 1, where most probabilities of a good model are.
    """
    best = (0.0, 1.0)  # at 0 every token exits after the first layer
    low, high = 0.0, 1.0
    for _ in range(PROBES):
        middle = (low + high) / 2
        threshold = 1 - (1 - middle) ** 3
        found = mean_layers(threshold)
        if found > wanted:
            high = middle
            continue
        low = middle
        best = max(best, (threshold, found), key=lambda pair: (pair[1], pair[0]))
        if wanted - found < TOLERANCE:
            break
    return best


def _mean_layers(checkpoint: Checkpoint, prompts: Sequence[list[int]], threshold: float, max_new_tokens: int) -> float:
    system = CalmSystem("calm", checkpoint, Threshold(threshold))
    ordered = sorted(prompts, key=len)
    turns = [system.decode(ordered[at : at + BATCH_SIZE], max_new_tokens) for at in range(0, len(ordered), BATCH_SIZE)]
    tokens = sum(turn.tokens for turn in turns)
    return sum(turn.layers for turn in turns) / tokens if tokens else 1.0
