"""Agreement: the tokens of a text that full depth would have chosen, a quality that needs no reference."""

from collections.abc import Sequence

import torch

from skipdecode.generate.request import GenerativeModel


@torch.no_grad()
def agreeing_tokens(
    model: GenerativeModel, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> list[list[bool]]:
    """For each token of each text, whether the whole model scores it best behind what stands before it.

    A row at a time through the model's own forward pass, so that no padding and no copy of weights plays a part. In
    half precision a near tie may fall to the other side than in a decode step: full depth's own texts say how often.

    Args:
        model: a causal language model, in eval mode.
        prompts: token ids, not empty.
        texts: token ids that were generated behind them.
    """
    found: list[list[bool]] = []
    for prompt, text in zip(prompts, texts, strict=True):
        if not text:
            found.append([])
            continue
        ids = torch.tensor([[*prompt, *text]], device=model.device)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]  # [tokens, vocabulary]
        found.append((logits.argmax(dim=-1) == ids[0, len(prompt) :]).tolist())
    return found
