"""A prefill of the fast path gives the model's own logits, and every key and value that decoding will read."""

from typing import Any

import pytest
import torch
from decoding_cases import LAYERS, MODELS, WITHOUT_GRAPHS, fresh_model
from tiny_models import ragged_prompts

from skipdecode import PlannedCache, SkipSchedule, skip_layers
from skipdecode.fastpath import layer
from skipdecode.fastpath.graph_capture import GraphRecorder
from skipdecode.fastpath.layer import FastLayer
from skipdecode.fastpath.model import FastDecoder
from skipdecode.fastpath.prompt_graphs import PROMPT_GRAIN, PromptGraph, pad_to_multiple
from skipdecode.generate.fast_path import fast_path

FULL = SkipSchedule(LAYERS, 5, 2, horizon=4)
AS_MAX = SkipSchedule(LAYERS, 4, 2, horizon=4, prompt="max")
STOPPED = SkipSchedule(LAYERS, 4, 2, horizon=4, prompt_stop=2)
STEPS = 6


def masks(name: str) -> torch.Tensor:
    """Attention masks of three prompts of 12 tokens."""
    mask = torch.ones(3, 12, dtype=torch.long)
    if name == "padded":
        mask[0, :9] = mask[1, :4] = 0
    elif name == "holes":  # also at the last position
        mask[0, 3:5] = mask[1, -1] = mask[2, 0] = 0
    return mask


def run_fast_path(
    model: Any, schedule: SkipSchedule, ids: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, PlannedCache]:
    cache = PlannedCache(schedule, STEPS)
    return FastDecoder(model).prefill(ids, schedule.prompt_layers, cache, mask, stop=schedule.prompt_stop), cache


def run_by_graph(
    model: Any, schedule: SkipSchedule, ids: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, PlannedCache]:
    """A prefill in buffers that another prompt of the same shape has used; without a GPU no graph is captured."""
    decoder, cache = FastDecoder(model), PlannedCache(schedule, STEPS, prompt_columns=PROMPT_GRAIN)
    graph = PromptGraph(cache, schedule.prompt_layers, schedule.prompt_stop)
    others = (ids.flip(1), torch.ones_like(mask)), (ids.flip(0), mask.flip(0))
    for tokens, shown in (*others, (ids, mask)):
        tokens, shown = (pad_to_multiple(each, PROMPT_GRAIN) for each in (tokens, shown))
        cache.reset()  # type: ignore[no-untyped-call]
        inputs = decoder.prompt_inputs(shown, None, keep_padding=True)
        assert inputs.bias is not None
        assert bool(inputs.bias.isfinite().all())  # not every attention kernel takes rows that are hidden whole
        logits = graph.run(decoder, tokens, inputs, GraphRecorder())
    return logits, cache


@torch.no_grad()
def assert_prefills_equal(
    model: Any, schedule: SkipSchedule, ids: torch.Tensor, mask: torch.Tensor, run: Any = run_fast_path
) -> None:
    logits, cache = run(model, schedule, ids, mask)
    own_cache = PlannedCache(schedule, STEPS)
    positions = {"position_ids": (mask.cumsum(-1) - 1) * mask} if model.config.model_type != "bloom" else {}
    with skip_layers(model, schedule, prompt_columns=ids.shape[1]):
        own = model(input_ids=ids, attention_mask=mask, past_key_values=own_cache, **positions).logits[:, -1]
    torch.testing.assert_close(logits, own, atol=1e-4, rtol=1e-4)
    shown = mask.bool()
    for index, (ours, theirs) in enumerate(zip(cache.layers, own_cache.layers, strict=True)):
        end, length = ours.get_seq_length(), ids.shape[1]
        padding = -length % PROMPT_GRAIN if run is run_by_graph and end else 0
        assert end == theirs.get_seq_length() + padding
        if schedule.cutoffs(STEPS)[index] == 0:
            assert ours.keys is None
            continue
        for mine, its in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert mine is not None
            assert its is not None
            held = [mine[:, :, end - length : end], its[:, :, :length]]
            torch.testing.assert_close(*(slots.transpose(1, 2)[shown] for slots in held), atol=1e-4, rtol=1e-4)
            assert bool(mine[:, :, :end].isfinite().all())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", [FULL, AS_MAX, STOPPED], ids=["full", "max", "stopped"])
def test_prefill_logits_keys_and_values_equal_the_models_own(name: str, schedule: SkipSchedule) -> None:
    model = fresh_model(name)
    assert fast_path(model).why_not() is None
    ids, _ = ragged_prompts([12, 12, 12], 3)
    for shown in ("all", "padded", "holes"):
        assert_prefills_equal(model, schedule, ids, masks(shown))
    assert_prefills_equal(model, schedule, ids[:, :1], torch.ones(3, 1, dtype=torch.long))


@pytest.mark.parametrize("name", sorted({*MODELS} - WITHOUT_GRAPHS))
@pytest.mark.parametrize("schedule", [FULL, AS_MAX, STOPPED], ids=["full", "max", "stopped"])
def test_a_prefill_by_a_graph_equals_the_models_own(name: str, schedule: SkipSchedule) -> None:
    model = fresh_model(name)
    ids, _ = ragged_prompts([12, 12, 12], 3)
    for shown in ("all", "padded", "holes"):
        assert_prefills_equal(model, schedule, ids, masks(shown), run_by_graph)


@pytest.mark.parametrize("name", ["opt", "bloom", "mistral", "phi"])
def test_computing_a_few_rows_at_a_time_gives_the_same_prefill(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "ROWS_TOGETHER", 5)
    ids, mask = ragged_prompts([12, 3, 7], 3)
    assert_prefills_equal(fresh_model(name), FULL, ids, mask)


def test_padding_is_not_computed_and_the_last_layer_finishes_only_the_last_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finished: list[int] = []
    finish = FastLayer.finish

    def counting(self: FastLayer, hidden: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        finished.append(len(hidden))
        return finish(self, hidden, *rest)

    monkeypatch.setattr(FastLayer, "finish", counting)
    ids, mask = ragged_prompts([12, 3, 7], 3)
    with torch.no_grad():
        run_fast_path(fresh_model("opt"), AS_MAX, ids, mask)
    assert finished == [22, 22, 22, 3]


@pytest.mark.parametrize("name", ["opt", "bloom", "mistral", "llama"])
def test_a_row_of_padding_only_changes_no_other_row(name: str) -> None:
    ids, mask = ragged_prompts([12, 7], 3)
    model = fresh_model(name)
    with torch.no_grad():
        alone, _ = run_fast_path(model, FULL, ids[1:], mask[1:])
        mask[0] = 0
        for run in (run_fast_path, *([run_by_graph] if name not in WITHOUT_GRAPHS else [])):
            both, _ = run(model, FULL, ids, mask)
            assert bool(both.isfinite().all())
            torch.testing.assert_close(both[1:], alone, atol=1e-4, rtol=1e-4)
