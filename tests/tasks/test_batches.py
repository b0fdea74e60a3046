"""Prompts are padded on the left and completions on the right, so that each layer runs on a prefix of positions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data import Example
from data.batches import encode_pairs, encode_prompts
from data.vocabulary import MIN_SIZE, train_tokenizer
from skipdecode import ConfigError
from skipdecode.checkpoint.loading import load_tokenizer
from skipdecode.training.batch_layout import IGNORED, lay_out
from skipdecode.training.collator import PromptCompletionCollator

tokens = st.lists(st.integers(3, 60), min_size=1, max_size=12)
EXAMPLES = [Example(str(n), f"slot: value {n}\n", (f"The value is {n}.", f"It says {n} – café")) for n in range(20)]


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=5))
def test_prompts_end_and_completions_start_at_the_same_position(rows: list[tuple[list[int], list[int]]]) -> None:
    prompts, completions = [p for p, _ in rows], [c for _, c in rows]
    batch = lay_out(prompts, completions, pad_token=1)
    start = batch["prompt_columns"]
    assert start == max(map(len, prompts))
    assert batch["input_ids"].shape == (len(rows), start + max(map(len, completions)))
    for n, (prompt, completion) in enumerate(rows):
        before, end = start - len(prompt), start + len(completion)
        after = batch["input_ids"].shape[1] - end
        assert batch["input_ids"][n].tolist() == [1] * before + prompt + completion + [1] * after
        assert batch["attention_mask"][n].nonzero().flatten().tolist() == list(range(before, end))
        assert batch["position_ids"][n, before:end].tolist() == list(range(end - before))
        counted = batch["labels"][n] != IGNORED
        assert counted.nonzero().flatten().tolist() == list(range(start, end))
        assert batch["labels"][n][counted].tolist() == completion


def test_an_example_gives_one_row_per_target_each_with_an_end_token() -> None:
    tokenizer = train_tokenizer(EXAMPLES, 300, max_length=64)
    columns = encode_pairs(tokenizer, EXAMPLES, max_prompt_tokens=64, max_completion_tokens=64)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    assert len(rows) == 40
    assert not any(columns["completion_cut"])
    row = rows[3]
    assert tokenizer.decode(row["prompt_ids"]) == EXAMPLES[1].prompt
    assert row["completion_ids"][-1] == tokenizer.eos_token_id
    assert tokenizer.decode(row["completion_ids"][:-1]) == EXAMPLES[1].targets[1]
    assert row["length"] == len(row["prompt_ids"]) + len(row["completion_ids"])
    batch = PromptCompletionCollator(tokenizer.pad_token_id)(rows[:5])
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.long


def test_a_completion_has_one_end_token_and_a_target_with_an_earlier_one_is_refused() -> None:
    tokenizer = train_tokenizer(EXAMPLES, 300, max_length=64)

    def completion(text: str) -> list[int]:
        pairs = encode_pairs(tokenizer, [Example("7", "a", (text,))], max_prompt_tokens=64, max_completion_tokens=64)
        ids: list[int] = pairs["completion_ids"][0]
        return ids

    assert completion("It says 3.</s>") == completion("It says 3.</s></s>") == completion("It says 3.")
    assert completion("</s>") == completion("") == [tokenizer.eos_token_id]
    with pytest.raises(ConfigError, match=r"a target of 7 contains the tokenizer's end token, '</s>', before its end"):
        completion("It says 3.</s> Or 4.")
    # In a chat, end tokens end turns too.
    chat = encode_prompts(tokenizer, [Example("7", "hello</s>there", ())], 64, "")
    assert tokenizer.eos_token_id in chat[0].ids


def test_long_completions_are_truncated_and_counted_and_long_prompts_are_refused() -> None:
    tokenizer = train_tokenizer(EXAMPLES, 300, max_length=64)
    columns = encode_pairs(tokenizer, EXAMPLES, max_prompt_tokens=64, max_completion_tokens=4)
    assert sum(columns["completion_cut"]) == 40
    assert {len(ids) for ids in columns["completion_ids"]} == {4}
    with pytest.raises(ConfigError, match=r"the prompt of 0 has \d+ tokens, at most 2 are allowed: do this"):
        encode_prompts(tokenizer, EXAMPLES[:1], 2, "do this")


def test_a_trained_tokenizer_encodes_any_text_and_reloads_unchanged(tmp_path) -> None:  # type: ignore[no-untyped-def]
    tokenizer = train_tokenizer(EXAMPLES, 300, max_length=64)
    assert len(tokenizer) == 300
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (1, 2)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    again = load_tokenizer(str(tmp_path))
    for text in ("The value is 3.", "naïve — 日本 €20\n", " two  spaces "):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert again(text)["input_ids"] == ids
    assert again.padding_side == "left"
    with pytest.raises(ConfigError, match=f"at least {MIN_SIZE}"):
        train_tokenizer(EXAMPLES, 100, max_length=64)
