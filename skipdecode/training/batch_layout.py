"""Prompts and completions in one batch, padded so that every completion starts at the same position."""

from collections.abc import Sequence
from typing import Any

import torch

IGNORED = -100  # the label that losses ignore in torch and transformers


def lay_out(prompts: Sequence[list[int]], completions: Sequence[list[int]], pad_token: int) -> dict[str, Any]:
    """Pad a batch so that all completions start at the same position, as `skipdecode.skip_layers` needs.

    Args:
        prompts, completions: token ids of each.
        pad_token: the id that fills prompts on the left and completions on the right.

    Returns:
        `input_ids`, `attention_mask`, `position_ids` and `labels`, each [batch, positions], and `prompt_columns`, the
        number of positions of the prompts. Padding and prompts have the label IGNORED.
    """
    before, after = max(map(len, prompts)), max(map(len, completions))
    shape = (len(prompts), before + after)
    input_ids = torch.full(shape, pad_token)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, IGNORED)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = before - len(prompt), before + len(completion)
        input_ids[row, start:end] = torch.tensor(prompt + completion)
        attention_mask[row, start:end] = 1
        labels[row, before:end] = torch.tensor(completion)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        "labels": labels,
        "prompt_columns": before,
    }
