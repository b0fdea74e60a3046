"""Agreement: tokens that transformers' own decoding would have chosen behind the same text."""

import pytest
import torch
from fastpath_cases import tiny

from skipdecode import SkipSchedule, skip_generate
from skipdecode.timing.agreement import agreeing_tokens

PROMPTS = [[5], [6], [8, 8, 30]]


def next_token(model, ids: list[int]) -> int:
    inputs = torch.tensor([ids])
    made = {"max_new_tokens": 1, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(inputs)}
    return int(model.generate(inputs, **made)[0, -1])


@pytest.mark.parametrize("name", ["opt", "gpt2", "llama"])
def test_a_token_agrees_where_transformers_would_choose_it_next(name: str) -> None:
    model = tiny(name)
    schedule = SkipSchedule(6, 3, 1, horizon=6)
    texts: list[list[int]] = [[]]
    for prompt in PROMPTS[1:]:
        made = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        output = model.generate(torch.tensor([prompt]), custom_generate=skip_generate, schedule=schedule, **made)
        texts.append(output[0, len(prompt) :].tolist())
    found = agreeing_tokens(model, PROMPTS, texts)
    assert found == [
        [next_token(model, [*prompt, *text[:n]]) == token for n, token in enumerate(text)]
        for prompt, text in zip(PROMPTS, texts, strict=True)
    ]
    assert len({agrees for row in found for agrees in row}) == 2, "else a measure that is always the same would pass"
