"""Counts of sampled completions of lossless decoding, and their probabilities at full depth."""

from typing import Any

import torch
from fastpath_cases import tiny
from lossless_cases import drafting
from tiny_models import VOCABULARY, ragged_prompts

from skipdecode import SkipSchedule, skip_generate
from skipdecode.generate.lossless_loop import DraftCounts

ALLOWED, TOKENS = 4, 4  # size of the vocabulary that is sampled from, and new tokens of a completion
TEMPERATURE, TOP_P = 3.0, 0.95
SAMPLING = {
    "do_sample": True,
    "suppress_tokens": list(range(ALLOWED, VOCABULARY)),
    "temperature": TEMPERATURE,
    "top_k": 0,
    "top_p": TOP_P,
    "eos_token_id": None,
}


def sampled_counts(
    name: str, draft: SkipSchedule, rows: int, calls: int, draft_counts: DraftCounts | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each completion of `TOKENS` tokens was sampled, and its probability at full depth, [completions].

    The last entry stands for all completions of probability 0.
    """
    model: Any = tiny(name)
    ids, mask = ragged_prompts([5], 3)
    request = {"custom_generate": skip_generate, "schedule": draft, "lossless": True, **SAMPLING}
    request["draft_counts"] = draft_counts
    completions, probabilities = _all_completions(model, ids)
    places = {tuple(completion): place for place, completion in enumerate(completions.tolist())}
    counts = torch.zeros(len(completions) + 1, dtype=torch.double)
    for call in range(calls):
        torch.manual_seed(call)
        batch = {"input_ids": ids.expand(rows, -1), "attention_mask": mask.expand(rows, -1)}
        with drafting(TOKENS):
            found = model.generate(**batch, max_new_tokens=TOKENS, **request)[:, 5:]
        for completion in found.tolist():
            counts[places.get(tuple(completion), -1)] += 1
    return counts, torch.cat([probabilities, torch.zeros(1)])


@torch.no_grad()
def _all_completions(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every possible completion, [completions, tokens], and its probability by the model's uncached forward pass."""
    completions, probabilities = torch.empty(1, 0, dtype=torch.long), torch.ones(1, dtype=torch.double)
    for _ in range(TOKENS):
        logits = model(torch.cat([ids.expand(len(completions), -1), completions], dim=1)).logits[:, -1].double()
        scores, tokens = (logits[:, :ALLOWED] / TEMPERATURE).sort(descending=True)
        shares = scores.softmax(dim=-1)
        shares = torch.where(shares.cumsum(dim=-1) - shares < TOP_P, shares, 0.0)
        shares = shares / shares.sum(dim=-1, keepdim=True)
        probabilities = (probabilities[:, None] * shares).flatten()
        completions = torch.cat([completions.repeat_interleave(ALLOWED, dim=0), tokens.flatten()[:, None]], dim=1)
    return completions, probabilities


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """The p-value of Pearson's chi-squared test; completions with an expected count below 5 are pooled."""
    if counts[probabilities == 0].any():
        return 0.0
    counts, probabilities = counts[probabilities > 0], probabilities[probabilities > 0]
    expected = probabilities * counts.sum()
    rare = expected < 5
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.double), statistic / 2))
