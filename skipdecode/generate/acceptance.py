"""The acceptance rule: which drafts of a sequence stay, and which token of full depth follows them."""

from collections.abc import Iterable, Iterator, Sequence

import torch


def accepted_tokens(drafts: Sequence[int], chosen: Iterable[int]) -> Iterator[int]:
    """The new tokens of one sequence: the tokens that full depth chooses, up to the first that differs from its draft.

    If full depth chooses greedily, these are its own tokens. If it samples, they have its distribution, for drafts that
    were not sampled. The next token is chosen only after the one before has been taken.

    Args:
        chosen: full depth's token at the position of each draft, and the one after the last draft.
    """
    for n, token in enumerate(chosen):
        yield token
        if n == len(drafts) or token != drafts[n]:
            return


def accept_greedy(drafts: Sequence[Sequence[int]], scores: torch.Tensor) -> list[list[int]]:
    """The new tokens of each sequence if full depth chooses the likeliest tokens.

    Args:
        scores: of full depth, [tokens, vocabulary]: for each sequence, those of its drafts and of the next token.
    """
    chosen = scores.argmax(dim=-1).tolist()
    if not any(drafts):
        return [[token] for token in chosen]
    new_tokens, first = [], 0
    for drafted in drafts:
        new_tokens.append(list(accepted_tokens(drafted, chosen[first : first + len(drafted) + 1])))
        first += len(drafted) + 1
    return new_tokens


def accept_sampled(
    drafts: Sequence[Sequence[int]], proposed: Sequence[Sequence[torch.Tensor]], scores: torch.Tensor
) -> list[list[int]]:
    """The new tokens of each sequence for sampled drafts, distributed as if full depth had sampled each token
    (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1).

    A draft is accepted with probability min(1, p / q). The first one that is rejected is replaced by a token sampled
    from max(0, p - q), normalised; if all are accepted, one more token is sampled from p.

    Args:
        proposed: for each draft, the probabilities q that it was sampled from, [vocabulary].
        scores: as in `accept_greedy`; their softmax is p.
    """
    probabilities = torch.softmax(scores, dim=-1)
    firsts = [sum(len(drafted) + 1 for drafted in drafts[:row]) for row in range(len(drafts))]
    accepted = [0] * len(drafts)
    if any(drafts):
        places = [first + n for first, drafted in zip(firsts, drafts, strict=True) for n in range(len(drafted))]
        tokens = torch.tensor([token for drafted in drafts for token in drafted], device=scores.device)[:, None]
        p = probabilities[places].gather(1, tokens)[:, 0]
        q = torch.stack([each for of_sequence in proposed for each in of_sequence]).gather(1, tokens)[:, 0]
        kept = iter((torch.rand_like(p) * q < p).tolist())
        for row, drafted in enumerate(drafts):
            of_sequence = [next(kept) for _ in drafted]
            accepted[row] = [*of_sequence, False].index(False)
    rest = probabilities[[first + count for first, count in zip(firsts, accepted, strict=True)]]  # [rows, vocabulary]
    rejected = [row for row, count in enumerate(accepted) if count < len(drafts[row])]
    if rejected:
        residual = (rest[rejected] - torch.stack([proposed[row][accepted[row]] for row in rejected])).clamp(min=0)
        # If p and q differ by rounding only, the residual is zero: p itself is sampled from.
        rest[rejected] = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, rest[rejected])
    sampled = torch.multinomial(rest, num_samples=1)[:, 0].tolist()
    return [[*drafted[:count], token] for drafted, count, token in zip(drafts, accepted, sampled, strict=True)]
