"""Agreement: tokens that transformers' own decoding would have chosen after the same tokens."""

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
def test_a_token_agrees_if_transformers_would_choose_it_next(name: str) -> None:
    model = tiny(name)
    schedule = SkipSchedule(6, 3, 1, horizon=6)
    completions: list[list[int]] = [[]]
    for prompt in PROMPTS[1:]:
        made = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        output = model.generate(torch.tensor([prompt]), custom_generate=skip_generate, schedule=schedule, **made)
        completions.append(output[0, len(prompt) :].tolist())
    found = agreeing_tokens(model, PROMPTS, completions)
    assert found == [
        [next_token(model, [*prompt, *completion[:n]]) == token for n, token in enumerate(completion)]
        for prompt, completion in zip(PROMPTS, completions, strict=True)
    ]
    assert len({agrees for row in found for agrees in row}) == 2, "otherwise a constant result would pass"
