"""How many drafts of each row full depth takes, and which token of its own comes next."""

from collections.abc import Sequence
from itertools import takewhile

import torch


def accept_chosen(drafts: Sequence[Sequence[int]], scores: torch.Tensor) -> list[list[int]]:
    """The new tokens of each row, greedily: the drafts that score best, and the best token behind them.

    Args:
        drafts: of each row, any number.
        scores: full depth's [tokens, vocabulary], for each row of its drafts and of what follows the last one.
    """
    chosen = scores.argmax(dim=-1).tolist()
    if not any(drafts):
        return [[token] for token in chosen]
    found, at = [], 0
    for drafted in drafts:
        best = chosen[at : at + len(drafted) + 1]
        agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafted, best, strict=False)))
        found.append(best[: agreed + 1])
        at += len(best)
    return found


def accept_sampled(
    drafts: Sequence[Sequence[int]], proposed: Sequence[Sequence[torch.Tensor]], scores: torch.Tensor
) -> list[list[int]]:
    """The new tokens of each row, distributed as if each were drawn at full depth (Leviathan et al. 2023, algorithm 1).

    A draft is taken with probability min(1, p / q). The first one that isn't makes way for a token drawn from what p
    has beyond q; where all are taken, one more is drawn from p.

    Args:
        drafts: of each row, any number, each drawn from
        proposed: the probabilities q [vocabulary].
        scores: as in `accept_chosen`; their softmax is p.
    """
    probabilities = torch.softmax(scores, dim=-1)
    firsts = [sum(len(drafted) + 1 for drafted in drafts[:row]) for row in range(len(drafts))]
    taken = [0] * len(drafts)
    if any(drafts):
        places = [first + n for first, drafted in zip(firsts, drafts, strict=True) for n in range(len(drafted))]
        tokens = torch.tensor([token for drafted in drafts for token in drafted], device=scores.device)[:, None]
        mine = probabilities[places].gather(1, tokens)[:, 0]
        theirs = torch.stack([q for of_row in proposed for q in of_row]).gather(1, tokens)[:, 0]
        kept = iter((torch.rand_like(mine) * theirs < mine).tolist())
        for row, drafted in enumerate(drafts):
            of_row = [next(kept) for _ in drafted]
            taken[row] = [*of_row, False].index(False)
    rest = probabilities[[first + count for first, count in zip(firsts, taken, strict=True)]]  # [rows, vocabulary]
    refused = [row for row, count in enumerate(taken) if count < len(drafts[row])]
    if refused:
        beyond = (rest[refused] - torch.stack([proposed[row][taken[row]] for row in refused])).clamp(min=0)
        # Nothing is beyond where p and q are the same but for rounding.
        rest[refused] = torch.where(beyond.sum(dim=-1, keepdim=True) > 0, beyond, rest[refused])
    drawn = torch.multinomial(rest, num_samples=1)[:, 0].tolist()
    return [[*drafted[:count], token] for drafted, count, token in zip(drafts, taken, drawn, strict=True)]
