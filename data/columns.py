"""Prompts and completions as token columns, laid out so that a schedule's layers run on prefixes of them (law 3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.task import Example
from skipdecode.errors import ConfigError
from skipdecode.training.batch_layout import lay_out

ROW = ("prompt_ids", "completion_ids", "length", "prompt_cut", "completion_cut")


@dataclass(frozen=True)
class Prompt:
    """The token ids of a prompt, and whether its body lost its end."""

    ids: list[int]
    cut: bool = False


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    limit: int,
    advice: str,
    *,
    cut_to: int | None = None,
) -> list[Prompt]:
    """Token ids of prompts: those that `tokenizer(prompt)` gives whoever decodes them later.

    A prompt with an instruction that is longer than `cut_to` tokens (None: `limit`) loses the end of its body, which is
    encoded apart from the instruction then. Raises ConfigError, ending in `advice`, for one without that is longer than
    `limit`, and for an instruction that leaves no room for a body.
    """
    if not examples:
        return []
    most = limit if cut_to is None else min(cut_to, limit)
    # Not verbose: lengths are ours to judge.
    wholes = tokenizer([example.prompt for example in examples], verbose=False)["input_ids"]
    prompts = [Prompt(ids) for ids in wholes]
    fits = [most if example.instruction else limit for example in examples]
    long = [n for n, fit in enumerate(fits) if len(wholes[n]) > fit]
    if not long:
        return prompts
    bodies = tokenizer([examples[n].body for n in long], verbose=False)["input_ids"]
    ends = tokenizer([examples[n].instruction for n in long], add_special_tokens=False, verbose=False)["input_ids"]
    for n, body, end in zip(long, bodies, ends, strict=True):
        if not end or len(end) >= most:
            raise ConfigError(
                f"the prompt of {examples[n].id} has {len(wholes[n])} tokens, at most {fits[n]} fit: {advice}"
            )
        prompts[n] = Prompt([*body[: most - len(end)], *end], cut=True)
    return prompts


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    max_prompt_tokens: int,
    max_completion_tokens: int,
) -> dict[str, list[Any]]:
    """A row for each prompt and target, as columns.

    `prompt_ids`, `completion_ids` (with one end token, also where a target brings its own), `length` (of both), and
    whether tokens were lost: `prompt_cut`, in the first row of an example alone, and `completion_cut`. Raises what
    `encode_prompts` raises, and ConfigError for a target with an end token before its end.
    """
    advice = "raise data.max_prompt_tokens, or shorten the prompt"
    prompts = encode_prompts(tokenizer, examples, max_prompt_tokens, advice)
    targets = [target for example in examples for target in example.targets]
    completions = iter(tokenizer(targets, add_special_tokens=False, verbose=False)["input_ids"] if targets else [])
    columns: dict[str, list[Any]] = {name: [] for name in ROW}
    for example, prompt in zip(examples, prompts, strict=True):
        for number in range(len(example.targets)):
            whole = _ended(next(completions), tokenizer, example.id)
            completion = whole[:max_completion_tokens]
            values = (prompt.ids, completion, len(prompt.ids) + len(completion))
            cuts = (prompt.cut and number == 0, len(whole) > max_completion_tokens)
            for name, value in zip(ROW, (*values, *cuts), strict=True):
                columns[name].append(value)
    return columns


def _ended(ids: list[int], tokenizer: PreTrainedTokenizerBase, name: str) -> list[int]:
    """A target's tokens and one end token."""
    end = tokenizer.eos_token_id
    while ids and ids[-1] == end:
        ids = ids[:-1]
    if end in ids:
        raise ConfigError(
            f"a target of {name} has the tokenizer's end token, {tokenizer.eos_token!r}, before its end: what follows "
            "would be trained and never decoded; take it out of the text"
        )
    return [*ids, end]


class ColumnCollator:
    """Collates rows with `prompt_ids` and `completion_ids` into a batch in columns."""

    def __init__(self, pad_token: int) -> None:
        self.pad_token = pad_token

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return lay_out([r["prompt_ids"] for r in rows], [r["completion_ids"] for r in rows], self.pad_token)
