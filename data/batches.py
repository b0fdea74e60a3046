"""Tokenised prompts and completions."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.conversation import Conversation
from data.task import Example
from skipdecode.errors import ConfigError

ROW_COLUMNS = ("prompt_ids", "completion_ids", "length", "prompt_cut", "completion_cut")


@dataclass(frozen=True)
class Prompt:
    """The token ids of a prompt, and whether its body was truncated."""

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
    """Tokenise prompts, exactly as `tokenizer(prompt)` does at decoding time.

    A prompt with an instruction that is longer than `cut_to` is truncated at the end of its body, which is then
    tokenised apart from the instruction.

    Args:
        tokenizer: the model's tokenizer.
        examples: the examples.
        limit: maximum length in tokens; a longer prompt without an instruction is an error.
        advice: end of the error message.
        cut_to: length in tokens to which prompts with an instruction are truncated; None: `limit`.

    Raises:
        ConfigError: for a prompt that is too long and has no instruction, and where the instruction alone is too long.
    """
    if not examples:
        return []
    max_cut = limit if cut_to is None else min(cut_to, limit)
    # Lengths are checked below, so the tokenizer's warning about them is turned off (verbose=False).
    untruncated = _untruncated(tokenizer, examples)
    prompts = [Prompt(ids) for ids in untruncated]
    limits = [max_cut if example.instruction else limit for example in examples]
    long = [n for n, of_prompt in enumerate(limits) if len(untruncated[n]) > of_prompt]
    if not long:
        return prompts
    bodies = tokenizer([examples[n].body for n in long], verbose=False)["input_ids"]
    ends = tokenizer([examples[n].instruction for n in long], add_special_tokens=False, verbose=False)["input_ids"]
    for n, body, end in zip(long, bodies, ends, strict=True):
        if not end or len(end) >= max_cut:
            where = Conversation.of_json(examples[n].chat).where if examples[n].chat else examples[n].id
            raise ConfigError(
                f"the prompt of {where} has {len(untruncated[n])} tokens, at most {limits[n]} are allowed: {advice}"
            )
        prompts[n] = Prompt([*body[: max_cut - len(end)], *end], cut=True)
    return prompts


def _untruncated(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[list[int]]:
    if examples[0].chat:  # a task has either conversations or texts
        return [Conversation.of_json(example.chat).prompt_ids(tokenizer) for example in examples]
    ids: list[list[int]] = tokenizer([example.prompt for example in examples], verbose=False)["input_ids"]
    return ids


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    max_prompt_tokens: int,
    max_completion_tokens: int,
    end_tokens: Collection[int] = (),
) -> dict[str, list[Any]]:
    """Make one training row for each pair of prompt and target.

    Args:
        tokenizer: the model's tokenizer.
        examples: the examples.
        max_prompt_tokens: maximum prompt length.
        max_completion_tokens: length to which completions are truncated.
        end_tokens: the tokens that end generation, for conversations; empty: the tokenizer's end token.

    Returns:
        The rows as columns: `prompt_ids`, `completion_ids` (ending in exactly one end token), `length` (of both), and
        whether they were truncated: `completion_cut`, and `prompt_cut`, which is set only in an example's first row.

    Raises:
        ConfigError: as `encode_prompts` and `Conversation.answer_ids` do, and for a target with an end token before
            its end.
    """
    advice = "raise data.max_prompt_tokens, or shorten the prompt"
    prompts = encode_prompts(tokenizer, examples, max_prompt_tokens, advice)
    completions = _completions(tokenizer, examples, end_tokens or [tokenizer.eos_token_id])
    columns: dict[str, list[Any]] = {name: [] for name in ROW_COLUMNS}
    for example, prompt in zip(examples, prompts, strict=True):
        for number in range(len(example.targets)):
            ended = next(completions)
            completion = ended[:max_completion_tokens]
            values = (prompt.ids, completion, len(prompt.ids) + len(completion))
            cuts = (prompt.cut and number == 0, len(ended) > max_completion_tokens)
            for name, value in zip(ROW_COLUMNS, (*values, *cuts), strict=True):
                columns[name].append(value)
    return columns


def _completions(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], end_tokens: Collection[int]
) -> Iterator[list[int]]:
    """The tokens of every target of every example, ending in exactly one end token."""
    if examples and examples[0].chat:
        for example in examples:
            yield Conversation.of_json(example.chat).answer_ids(tokenizer, end_tokens)
        return
    pairs = [(example.id, target) for example in examples for target in example.targets]
    texts = [target for _, target in pairs]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    for (name, _), ids in zip(pairs, encoded, strict=True):
        yield _ended(ids, tokenizer, name)


def _ended(ids: list[int], tokenizer: PreTrainedTokenizerBase, name: str) -> list[int]:
    """The tokens of a target, ending in exactly one end token."""
    end = tokenizer.eos_token_id
    while ids and ids[-1] == end:
        ids = ids[:-1]
    if end in ids:
        raise ConfigError(
            f"a target of {name} contains the tokenizer's end token, {tokenizer.eos_token!r}, before its end: decoding "
            "would stop there; remove it from the text"
        )
    return [*ids, end]
