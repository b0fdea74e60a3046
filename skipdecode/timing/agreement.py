"""Agreement: the share of tokens that full depth would have chosen too, a quality that needs no reference."""

from collections.abc import Sequence

import torch

from skipdecode.generate.request import GenerativeModel


@torch.no_grad()
def agreeing_tokens(
    model: GenerativeModel, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> list[list[bool]]:
    """For each token of each completion, whether it is full depth's likeliest token after the tokens before it.

    Sequences run one by one through the model's own forward pass, so that neither padding nor copies of weights have an
    influence. In half precision, near ties may be decided differently than in a decode step; the agreement of full
    depth's own completions shows how often. The model must be in eval mode, and each prompt has at least one token.
    """
    found: list[list[bool]] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        if not completion:
            found.append([])
            continue
        ids = torch.tensor([[*prompt, *completion]], device=model.device)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]  # [tokens, vocabulary]
        found.append((logits.argmax(dim=-1) == ids[0, len(prompt) :]).tolist())
    return found
