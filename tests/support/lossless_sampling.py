"""Sampled texts of lossless decoding, counted, beside the probabilities that full depth gives them."""

from typing import Any

import torch
from fastpath_cases import tiny
from lossless_cases import drafting
from tiny_models import VOCABULARY, ragged_prompts

from skipdecode import SkipSchedule, skip_generate

ALLOWED, TOKENS = 4, 4  # of so many tokens one is drawn, so many times
TEMPERATURE, TOP_P = 3.0, 0.95
SAMPLING = {
    "do_sample": True,
    "suppress_tokens": list(range(ALLOWED, VOCABULARY)),
    "temperature": TEMPERATURE,
    "top_k": 0,
    "top_p": TOP_P,
    "eos_token_id": None,
}


def sampled_texts(name: str, draft: SkipSchedule, rows: int, calls: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each text of `TOKENS` tokens came, and its probability at full depth, both [texts].

    The last place is that of all texts which can't come.
    """
    model: Any = tiny(name)
    ids, mask = ragged_prompts([5], 3)
    request = {"custom_generate": skip_generate, "schedule": draft, "lossless": True, **SAMPLING}
    texts, probabilities = _all_texts(model, ids)
    places = {tuple(text): place for place, text in enumerate(texts.tolist())}
    counts = torch.zeros(len(texts) + 1, dtype=torch.double)
    for call in range(calls):
        torch.manual_seed(call)
        batch = {"input_ids": ids.expand(rows, -1), "attention_mask": mask.expand(rows, -1)}
        with drafting(TOKENS):
            found = model.generate(**batch, max_new_tokens=TOKENS, **request)[:, 5:]
        for text in found.tolist():
            counts[places.get(tuple(text), -1)] += 1
    return counts, torch.cat([probabilities, torch.zeros(1)])


@torch.no_grad()
def _all_texts(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every text that can follow, [texts, tokens], and its probability by the model's own whole passes."""
    texts, probabilities = torch.empty(1, 0, dtype=torch.long), torch.ones(1, dtype=torch.double)
    for _ in range(TOKENS):
        logits = model(torch.cat([ids.expand(len(texts), -1), texts], dim=1)).logits[:, -1].double()
        scores, tokens = (logits[:, :ALLOWED] / TEMPERATURE).sort(descending=True)
        shares = scores.softmax(dim=-1)
        shares = torch.where(shares.cumsum(dim=-1) - shares < TOP_P, shares, 0.0)
        shares = shares / shares.sum(dim=-1, keepdim=True)
        probabilities = (probabilities[:, None] * shares).flatten()
        texts = torch.cat([texts.repeat_interleave(ALLOWED, dim=0), tokens.flatten()[:, None]], dim=1)
    return texts, probabilities


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """The probability of counts as far from what is expected, or farther; texts of which few are expected are one."""
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
