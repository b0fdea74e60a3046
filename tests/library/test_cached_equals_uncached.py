"""Law 5: what is decoded with the cache is what the masked model says, token for token; so are logits and gradients."""

import copy

import pytest
import torch
from decoding_cases import LAYERS, schedules
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_opt import naive_greedy, naive_logits, up_to_end
from tiny_models import END, OPT_KINDS, ragged_prompts, tiny_opt

from skipdecode import SkipSchedule, skip_generate, skip_layers

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)
kinds = st.sampled_from(sorted(OPT_KINDS))


def decode(model, ids, mask, schedule, new_tokens):
    request = {"custom_generate": skip_generate, "schedule": schedule, "max_new_tokens": new_tokens, "do_sample": False}
    output = model.generate(ids, attention_mask=mask, **request)
    return [up_to_end(row, END) for row in output[:, ids.shape[1] :].tolist()]


@settings(max_examples=10)  # test_random_decoding.py draws more, of batches and of full depth too
@given(kinds, schedules(), lengths, st.integers(0, 99))
def test_cached_greedy_decoding_equals_the_naive_loop(kind, schedule, prompt_lengths, seed):
    model = tiny_opt(kind, LAYERS)
    ids, mask = ragged_prompts(prompt_lengths, seed)
    new_tokens = 16  # beyond every horizon drawn above
    assert decode(model, ids, mask, schedule, new_tokens) == naive_greedy(model, ids, mask, schedule, new_tokens, END)


@settings(max_examples=40)
@given(kinds, schedules(), lengths, st.integers(1, 14), st.integers(0, 99))
def test_teacher_forced_logits_and_gradients_equal_the_masked_models(kind, schedule, prompt_lengths, new, seed):
    model = copy.deepcopy(tiny_opt(kind, LAYERS)).double()  # in float32, rounding decides on which side of 0 a ReLU is
    ids, mask = ragged_prompts(prompt_lengths, seed)
    prompt_columns = ids.shape[1]
    completion, _ = ragged_prompts([new] * len(prompt_lengths), seed + 1)
    ids, mask = torch.cat([ids, completion], 1), torch.cat([mask, torch.ones_like(completion)], 1)
    weights = torch.randn(ids.shape[0], ids.shape[1], 61, generator=torch.Generator().manual_seed(seed))
    weights = weights * mask[..., None]  # padding columns are nobody's output

    with skip_layers(model, schedule, prompt_columns=prompt_columns) as gate:
        ours = model(ids, attention_mask=mask, use_cache=False).logits
    reference = naive_logits(model, ids, mask, prompt_columns, schedule)
    torch.testing.assert_close(ours * mask[..., None], reference * mask[..., None], atol=1e-9, rtol=1e-9)
    assert gate.layer_positions == sum(schedule.position_cutoffs(prompt_columns, ids.shape[1]))

    def gradients(logits):
        found = torch.autograd.grad((logits * weights).sum(), list(model.parameters()), allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found, strict=True)]

    for mine, expected in zip(gradients(ours), gradients(reference), strict=True):
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(mine / scale, expected / scale, atol=1e-9, rtol=0)


def test_the_reference_notices_a_layer_too_many():
    """The comparison above can fail: another schedule gives other logits."""
    model = tiny_opt("opt", LAYERS)
    ids, mask = ragged_prompts([9, 9], 0)
    one, other = SkipSchedule(LAYERS, 3, 3, horizon=4), SkipSchedule(LAYERS, 4, 4, horizon=4)
    with torch.no_grad():
        difference = naive_logits(model, ids, mask, 4, one) - naive_logits(model, ids, mask, 4, other)
    assert difference.abs().max() > 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", sorted(OPT_KINDS))
def test_cached_greedy_decoding_equals_the_naive_loop_on_cuda(kind):
    model = tiny_opt(kind, LAYERS)
    ids, mask = ragged_prompts([3, 7, 5], 5)
    schedule = SkipSchedule(LAYERS, 5, 2, horizon=6)
    expected = naive_greedy(model, ids, mask, schedule, 12, END)
    try:
        assert decode(model.to("cuda"), ids.to("cuda"), mask.to("cuda"), schedule, 12) == expected
    finally:
        model.to("cpu")
