"""Law 6: the cache has exactly the size that the schedule needs, from the prefill to the last token."""

import gc
from typing import Any

import pytest
import torch
from decoding_cases import LAYERS, schedules
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import TINY_FAMILIES, ragged_prompts, tiny_family, tiny_opt
from transformers import PreTrainedModel

from skipdecode import CostModel, PlannedCache, SkipSchedule, skip_generate, solve_schedule


def planned(model: PreTrainedModel, schedule: SkipSchedule, rows: int, prompt: int, new_tokens: int) -> PlannedCache:
    ids, mask = ragged_prompts([prompt] * rows, 0)
    request: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
    request |= {"custom_generate": skip_generate, "schedule": schedule, "return_dict_in_generate": True}
    cache = model.generate(input_ids=ids, attention_mask=mask, **request).past_key_values
    assert isinstance(cache, PlannedCache)
    return cache


@settings(max_examples=30)
@given(schedules(), st.integers(1, 3), st.integers(1, 9), st.integers(1, 20))
def test_a_layers_cache_holds_exactly_the_prompt_and_the_tokens_that_run_it(schedule, rows, prompt, new_tokens):
    model = tiny_opt("opt", LAYERS)
    cache = planned(model, schedule, rows, prompt, new_tokens)
    steps = new_tokens - 1
    for layer, cached in enumerate(cache.layers):
        runs = sum(layer in schedule.layers_at(i) for i in range(steps))  # the reference counts one by one
        columns = prompt + runs if runs else 0
        assert cached.get_seq_length() == columns
        assert cached.nbytes == 2 * rows * columns * 32 * 4  # keys and values, rows, columns, hidden, float32
    assert cache.nbytes == CostModel.of(model).cache_bytes(schedule, prompt, steps, rows)


@pytest.mark.parametrize("model_type", sorted(TINY_FAMILIES))
def test_the_cache_of_every_family_has_the_predicted_size(model_type: str) -> None:
    model = tiny_family(model_type)
    schedule = SkipSchedule(6, 4, 2, horizon=5)
    expected = CostModel.of(model).cache_bytes(schedule, 7, 11, 2)
    assert planned(model, schedule, 2, 7, 12).nbytes == expected


def test_a_thousand_tokens_at_3x_need_less_than_half_of_the_full_cache() -> None:
    from configs.shapes import random_model, read_shape

    shape = {**read_shape("opt-small", "shape"), "vocab_size": 61, "max_position_embeddings": 1100}
    model = random_model(shape, torch.float32)
    schedule = solve_schedule(model, 3.0, horizon=1024, prompt_length=16)
    held = planned(model.eval(), schedule, 1, 16, 1024).nbytes
    cost = CostModel.of(model)
    assert held == cost.cache_bytes(schedule, 16, 1023)
    full = cost.cache_bytes(SkipSchedule.full_depth(12), 16, 1023)
    assert full == 2 * 12 * (16 + 1023) * 256 * 4
    assert held < full / 2


def test_calls_of_many_shapes_leak_no_tensor() -> None:
    """`scripts/soak.py` does this thousands of times and measures the memory of the process."""
    model = tiny_opt("opt", LAYERS)
    generator = torch.Generator().manual_seed(0)

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor | PlannedCache) for thing in gc.get_objects())

    before = 0
    for call in range(40):
        rows, prompt, new = (int(torch.randint(1, most, (1,), generator=generator)) for most in (4, 9, 12))
        ids, mask = ragged_prompts([prompt] * rows, call)
        schedule = SkipSchedule(LAYERS, 1 + call % 6, 1, horizon=1 + call % 7)
        request = {"custom_generate": skip_generate, "schedule": schedule, "max_new_tokens": new}
        model.generate(ids, attention_mask=mask, **request)
        del ids, mask
        if call == 9:
            before = alive()
    assert alive() <= before
