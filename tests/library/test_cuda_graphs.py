"""Decode steps on static buffers. Without a GPU they run without being captured as CUDA graphs."""

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fastpath_cases import MODELS, SCHEDULES, WINDOWED, fresh, generate, tiny
from tiny_models import tiny_opt

from skipdecode import ConfigError, SkipSchedule, skip_generate
from skipdecode.fastpath import cuda_graphs as graphs
from skipdecode.generate.fast_path import fast_path


@pytest.mark.parametrize("name", sorted({*MODELS} - WINDOWED))
@pytest.mark.parametrize("schedule", SCHEDULES, ids=["skipping", "full depth", "even placement"])
def test_steps_on_static_buffers_equal_other_steps_in_call_after_call(name: str, schedule: SkipSchedule) -> None:
    model = tiny(name)
    # Shapes return with other lengths in the same buffers: what an earlier call left there must not be attended to.
    for lengths in ([3, 12, 5], [9], [2, 4, 6], [40], [3, 12, 5], [6, 6]):
        static = generate(model, lengths, schedule, cuda_graphs=True, max_new_tokens=10)
        assert torch.equal(static, generate(model, lengths, schedule, max_new_tokens=10))
    assert fast_path(model).decoder().kept_graphs


def test_short_prompts_of_token_ids_run_by_a_graph_where_the_caller_asked_for_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Mock(wraps=graphs.StepGraphs.prefill)
    monkeypatch.setattr(graphs.StepGraphs, "prefill", lambda *args: run(*args))
    model: Any = fresh("opt")
    embeds = model.get_input_embeddings()(torch.ones(2, 8, dtype=torch.long))
    request = {"custom_generate": skip_generate, "schedule": SCHEDULES[0], "max_new_tokens": 3, "do_sample": False}
    for uses_graph, call in (
        (True, lambda: generate(model, [5, 3], SCHEDULES[0], cuda_graphs=True, max_new_tokens=3)),
        (False, lambda: generate(model, [5, 3], SCHEDULES[0], max_new_tokens=3)),
        (False, lambda: generate(model, [5] * 33, SCHEDULES[0], cuda_graphs=True, max_new_tokens=3)),
        (False, lambda: model.generate(inputs_embeds=embeds, cuda_graphs=True, eos_token_id=None, **request)),
    ):
        run.reset_mock()
        call()
        assert run.called == uses_graph


@pytest.mark.parametrize("name", sorted(WINDOWED))
def test_a_sliding_window_has_no_graphs(name: str) -> None:
    with pytest.raises(ConfigError, match="CUDA graphs aren't available for attention with a sliding window"):
        generate(tiny(name), [4, 6], SCHEDULES[0], cuda_graphs=True)


def test_cuda_graphs_without_a_fast_path_are_refused() -> None:
    model = fresh("llama")
    model.model.layers[2].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"cuda_graphs is True, which this model can't decode with: .*hook"):
        generate(model, [4, 6], SCHEDULES[0], cuda_graphs=True)


@pytest.mark.parametrize("name", ["llama", "opt", "bloom"])
def test_inference_mode_changes_no_token(name: str) -> None:
    model = fresh(name)
    expected = generate(model, [5, 3], SCHEDULES[0], max_new_tokens=10)
    for mode in (True, False, True, False, False):
        with torch.inference_mode(mode):
            assert torch.equal(generate(model, [5, 3], SCHEDULES[0], cuda_graphs=True, max_new_tokens=10), expected)


@pytest.mark.parametrize("name", ["llama", "opt", "bloom"])
def test_a_sequence_of_nan_does_not_change_later_sequences(name: str) -> None:
    """Whole buffers are attended to; slots that aren't written have weight 0, and 0 times NaN is NaN."""
    model: Any = fresh(name)
    expected = generate(model, [9], SCHEDULES[0], max_new_tokens=10)
    spoilt = torch.full((1, 42, model.config.hidden_size), torch.nan)
    request = {"custom_generate": skip_generate, "schedule": SCHEDULES[0], "cuda_graphs": True, "do_sample": False}
    model.generate(inputs_embeds=spoilt, max_new_tokens=10, eos_token_id=None, **request)
    assert torch.equal(generate(model, [9], SCHEDULES[0], cuda_graphs=True, max_new_tokens=10), expected)


@pytest.mark.parametrize("name", ["llama", "opt", "bloom"])
def test_padded_and_unpadded_batches_share_buffers(name: str) -> None:
    model: Any = tiny(name)
    ids = torch.randint(4, 32, (2, 8), generator=torch.Generator().manual_seed(3))
    for shown in ([5, 5], [5, 3], [5, 5]):
        mask = torch.tensor([[0] * (8 - length) + [1] * length for length in shown])
        request = {"attention_mask": mask, "max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0}
        request |= {"custom_generate": skip_generate, "schedule": SCHEDULES[0], "do_sample": False}
        static = model.generate(ids, cuda_graphs=True, **request)
        assert torch.equal(static, model.generate(ids, cuda_graphs=False, **request))


@pytest.mark.parametrize(("name", "late"), [("opt", True), ("llama", True), ("llama", False), ("bloom", False)])
def test_sequences_end_at_the_same_tokens_as_without_static_buffers(
    name: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late:  # ends are seen some steps later, as on a GPU
        monkeypatch.setattr(graphs, "steps_in_flight", lambda device: 2)
    check_ends(tiny(name))


@pytest.mark.parametrize("name", ["opt", "llama", "bloom"])
@pytest.mark.parametrize("lengths", [[64], [64, 60], [64, 64], [63, 5]])
def test_prompts_that_fill_their_buffers_decode_the_same_tokens(name: str, lengths: list[int]) -> None:
    for most in (1, 2, 3):
        request = {"max_new_tokens": most}
        found, expected = (generate(tiny(name), lengths, SCHEDULES[0], cuda_graphs=g, **request) for g in (True, False))
        assert torch.equal(found, expected), most


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_calls_with_and_without_position_ids_share_buffers(name: str) -> None:
    model: Any = tiny(name)
    ids = torch.randint(4, 32, (2, 6), generator=torch.Generator().manual_seed(4))
    request = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
    request |= {"custom_generate": skip_generate, "schedule": SCHEDULES[0], "do_sample": False}
    apart = torch.stack([torch.arange(6), torch.arange(3, 9)])
    for positions in ({}, {"position_ids": apart}, {}, {"position_ids": apart.flip(0)}):
        static = model.generate(ids, cuda_graphs=True, **positions, **request)
        assert torch.equal(static, model.generate(ids, cuda_graphs=False, **positions, **request))


def test_graphs_are_freed_with_their_model() -> None:
    model: Any = fresh("llama")
    generate(model, [4, 6], SCHEDULES[0], cuda_graphs=True)
    decoder = weakref.ref(fast_path(model).decoder())
    assert decoder().kept_graphs  # type: ignore[union-attr]
    del model
    # Twice: an object that is resurrected in one pass, as a tensor's may be, is left for the next.
    for _ in range(2):
        gc.collect()
    assert decoder() is None


def test_copies_and_graphs_of_changed_weights_are_freed_without_the_garbage_collector() -> None:
    model: Any = fresh("llama")
    gc.disable()
    try:
        generate(model, [4, 6], SCHEDULES[0], cuda_graphs=True)
        decoder = weakref.ref(fast_path(model).decoder())
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        generate(model, [4, 6], SCHEDULES[0], cuda_graphs=True)
        assert decoder() is None
    finally:
        gc.enable()


def test_threads_can_take_and_keep_graphs_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_KEPT", 5)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    decoder = fast_path(tiny("opt")).decoder()
    try:

        def work(seed: int) -> None:
            for turn in range(400):
                shape = (1 + (turn * seed) % 13, 8, True)
                graphs.keep_step_graphs(decoder, graphs.step_graphs(decoder, SCHEDULES[0], 3, shape, keep=True))

        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(work, seed) for seed in (3, 5, 7)]:
                done.result()
    finally:
        sys.setswitchinterval(before)
    assert len(decoder.kept_graphs) <= 5


def check_ends(model: Any) -> None:
    """Compare tokens with and without static buffers, where sequences end and rows leave at different steps."""
    for ends in ([3, 9, 17], [5, 6, 7, 8, 20, 21, 22, 23], list(range(0, 32, 2)), [31]):
        for lengths, most in (([3, 12, 5, 7, 7, 2, 9, 4], 40), ([6], 23), ([4, 4, 4], 2)):
            request = {"eos_token_id": ends, "pad_token_id": 1, "max_new_tokens": most}
            found, expected = (generate(model, lengths, SCHEDULES[0], cuda_graphs=g, **request) for g in (True, False))
            assert torch.equal(found, expected), (ends, lengths)


def test_each_budget_has_one_graph_which_later_calls_use_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_opt("opt", 6, seed=9)
    captured: list[tuple[int, ...]] = []
    capture = graphs.StepGraphs._capture

    def counting(self: Any, layers: tuple[int, ...], *others: Any) -> Any:
        captured.append(layers)
        return capture(self, layers, *others)

    monkeypatch.setattr(graphs.StepGraphs, "_capture", counting)
    schedule = SkipSchedule(6, 5, 2, horizon=8)
    for _ in range(3):
        generate(model, [5, 7], schedule, cuda_graphs=True, max_new_tokens=12)
    assert captured == [schedule.layers_for(budget) for budget in (5, 4, 3, 2)]


def test_the_least_recently_used_shape_is_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_KEPT", 4)
    model = tiny_opt("opt", 6, seed=10)
    for rows in (1, 2, 3, 4, 1, 5):
        generate(model, [4] * rows, SCHEDULES[0], cuda_graphs=True)
    assert [key[2] for key in fast_path(model).decoder().kept_graphs] == [3, 4, 1, 5]


def test_another_precision_of_matrix_products_has_its_own_graphs() -> None:
    model = tiny_opt("opt", 6, seed=14)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision
            generate(model, [4, 6], SCHEDULES[0], cuda_graphs=True)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert len(fast_path(model).decoder().kept_graphs) == 2


def test_a_cache_that_the_caller_gets_is_never_written_again() -> None:
    model = tiny_opt("opt", 6, seed=11)
    request = {"cuda_graphs": True, "return_dict_in_generate": True}
    first = generate(model, [4, 6], SCHEDULES[0], **request)
    before = first.past_key_values.layers[0].keys.clone()
    generate(model, [6, 4], SCHEDULES[0], **request)
    generate(model, [6, 4], SCHEDULES[0], cuda_graphs=True)
    assert torch.equal(first.past_key_values.layers[0].keys, before)
    assert first.past_key_values.get_seq_length() == 6 + 13


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_graphs_on_cuda_equal_the_models_own_steps(name: str) -> None:
    model: Any = tiny(name)
    try:
        model.to("cuda")
        for lengths in ([3, 12, 5], [9], [2, 4, 6], [3, 12, 5]):
            stock = generate(model, lengths, SCHEDULES[0], cache_implementation="dynamic")
            assert torch.equal(generate(model, lengths, SCHEDULES[0]), stock)
            assert torch.equal(generate(model, lengths, SCHEDULES[0], cuda_graphs=False), stock)
            if name not in WINDOWED:
                assert torch.equal(generate(model, lengths, SCHEDULES[0], cuda_graphs=True), stock)
        if name not in WINDOWED:
            check_ends(model)
    finally:
        model.to("cpu")
