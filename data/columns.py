"""Prompts and completions as token columns, laid out so that a schedule's layers run on prefixes of them (law 3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from data.task import Example
from skipdecode.errors import ConfigError

IGNORED = -100  # labels that no loss counts; the value that torch and transformers use


@dataclass(frozen=True)
class Encoded:
    """Training rows, and how many completions had to be cut."""

    rows: list[dict[str, Any]]
    completions_cut: int


def encode_prompt(tokenizer: PreTrainedTokenizerBase, example: Example, limit: int, advice: str) -> list[int]:
    """Token ids of a prompt. Raises ConfigError, ending in `advice`, where there are more than `limit`."""
    ids = list(tokenizer(example.prompt)["input_ids"])
    if len(ids) > limit:
        raise ConfigError(f"the prompt of {example.id} has {len(ids)} tokens, at most {limit} fit: {advice}")
    return ids


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    max_prompt_tokens: int,
    max_completion_tokens: int,
) -> Encoded:
    """A row for each prompt and target: `prompt_ids`, `completion_ids` (with the end token) and `length`."""
    rows: list[dict[str, Any]] = []
    cut = 0
    for example in examples:
        prompt = encode_prompt(
            tokenizer, example, max_prompt_tokens, "raise data.max_prompt_tokens, or shorten the prompt"
        )
        for target in example.targets:
            completion = [*tokenizer(target, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            cut += len(completion) > max_completion_tokens
            completion = completion[:max_completion_tokens]
            rows.append({"prompt_ids": prompt, "completion_ids": completion, "length": len(prompt) + len(completion)})
    return Encoded(rows, cut)


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


class ColumnCollator:
    """Collates rows of `encode_pairs` into a batch in columns."""

    def __init__(self, pad_token: int) -> None:
        self.pad_token = pad_token

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return lay_out([r["prompt_ids"] for r in rows], [r["completion_ids"] for r in rows], self.pad_token)
