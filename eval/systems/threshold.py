"""The threshold at which confidence exits run as many layers as a schedule does, found on validation prompts."""

from collections.abc import Callable, Sequence

from eval.journal import Journal
from eval.results import Threshold
from eval.systems.base import Checkpoint
from eval.systems.calm import CalmSystem

PROMPTS = 60  # of the validation data, at most
BATCH_SIZE = 32
PROBES = 12  # thresholds that are tried for a target, at most
CLOSE = 0.05  # layers per token below what is wanted that are near enough


def calibrated_threshold(
    checkpoint: Checkpoint,
    prompts: Sequence[list[int]],
    wanted_layers: float,
    *,
    max_new_tokens: int,
    journal: Journal,
    advance: Callable[[], None],
) -> Threshold:
    """The threshold whose tokens leave after `wanted_layers` on average, or as little below as can be found.

    Args:
        checkpoint: what decodes.
        prompts: token ids of validation prompts.
        wanted_layers: layers per token, 1 or more.
        max_new_tokens: of each prompt.
        journal: what is known of thresholds already, and where it is added.
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
    """The threshold of at most `wanted` layers per token, with as many as bisection finds, and how many they are.

    It stops once they are CLOSE. The scale that is halved is finer near 1, where the probabilities of a good model are.
    """
    best = (0.0, 1.0)  # at 0 every token leaves after the first layer
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
        if wanted - found < CLOSE:
            break
    return best


def _mean_layers(checkpoint: Checkpoint, prompts: Sequence[list[int]], threshold: float, max_new_tokens: int) -> float:
    system = CalmSystem("calm", checkpoint, Threshold(threshold))
    ordered = sorted(prompts, key=len)
    turns = [system.decode(ordered[at : at + BATCH_SIZE], max_new_tokens) for at in range(0, len(ordered), BATCH_SIZE)]
    tokens = sum(turn.tokens for turn in turns)
    return sum(turn.layers for turn in turns) / tokens if tokens else 1.0
