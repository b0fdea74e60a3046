"""Prompts and completions in one batch, padded so that every completion starts at the same position (law 3)."""

from collections.abc import Sequence
from typing import Any

import torch

IGNORED = -100  # labels that no loss counts; the value that torch and transformers use


def lay_out(prompts: Sequence[list[int]], completions: Sequence[list[int]], pad_token: int) -> dict[str, Any]:
    """A batch in columns: prompts end, and completions start, in the same column for every row.

    Returns `input_ids`, `attention_mask`, `position_ids` and `labels`, each [batch, columns], and `prompt_columns`: how
    many columns from the left are the prompts'. Padding and prompts carry the label IGNORED.
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
