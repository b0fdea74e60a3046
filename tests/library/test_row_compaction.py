"""Rows of ended sequences leave the decode steps: fewer rows run, and results and callbacks stay the same."""

from itertools import product
from typing import Any

import pytest
import torch
from fastpath_cases import MODELS, SCHEDULES, generate, tiny
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import PAD, ragged_prompts
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from skipdecode import PlannedCache, SkipSchedule, skip_generate
from skipdecode.fastpath import row_compaction as rows
from skipdecode.fastpath.model import FastDecoder
from skipdecode.fastpath.row_compaction import rows_to_keep

LENGTHS = [3, 12, 5, 7, 9, 12, 4, 6]  # of prompts
TOKENS = [9, 3, 14, 1, 6, 2, 14, 4]  # after how many tokens each row ends: neither the first nor the last row first
FULL = SkipSchedule.full_depth(6)
TIE = 0.1  # a difference of the two best scores that counts as a tie; on average they differ by 0.4


@pytest.fixture
def rows_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each step of the fast path ran."""
    counts: list[int] = []
    run = FastDecoder.__call__

    def counted(self: Any, tokens: torch.Tensor, *args: Any) -> torch.Tensor:
        counts.append(len(tokens))
        return run(self, tokens, *args)

    monkeypatch.setattr(FastDecoder, "__call__", counted)
    return counts


class EndsAfter(StoppingCriteria):
    """Ends each row after its own number of tokens; it has an `eos_token_id`, as transformers' for end tokens has."""

    eos_token_id = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(TOKENS, device=input_ids.device) + max(LENGTHS) <= input_ids.shape[1]


def decode(model: Any, schedule: SkipSchedule, *criteria: StoppingCriteria, **changes: Any) -> list[list[int]]:
    """Each row's new tokens, padding included."""
    request = {"stopping_criteria": StoppingCriteriaList(criteria), "pad_token_id": PAD, **changes}
    new: list[list[int]] = generate(model, LENGTHS, schedule, **request)[:, max(LENGTHS) :].tolist()
    return new


@pytest.mark.parametrize("weights", ["model", "packed", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_shrinking_batch_equal_the_same_rows_decoded_alone(
    name: str, weights: str, rows_run: list[int]
) -> None:
    model, schedule = tiny(name), SCHEDULES[2] if weights == "packed" else SCHEDULES[0]
    found = decode(model, schedule, EndsAfter(), weights=weights)
    assert rows_run == [7, 6, 5, 4, 4, 3, 3, 3, 2, 2, 2, 2, 2]
    ids, mask = ragged_prompts(LENGTHS, 4)
    request = {"custom_generate": skip_generate, "schedule": schedule, "weights": weights, "eos_token_id": None}
    request |= {"max_new_tokens": 14, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    for row, (length, end) in enumerate(zip(LENGTHS, TOKENS, strict=True)):
        prompt, seen = (tensor[row : row + 1, -length:] for tensor in (ids, mask))
        alone: Any = model.generate(prompt, attention_mask=seen, **request)
        text = alone.sequences[0, length:].tolist()
        assert found[row][end:] == [PAD] * (14 - end)
        apart = next((n for n in range(end) if found[row][n] != text[n]), None)
        if apart is not None:
            # Sums over padding may differ in their last bit, so that a value is rounded to another 8-bit step: nearly
            # equal scores then change places.
            scores = alone.scores[apart][0]
            assert weights == "int8"
            assert scores[text[apart]] - scores[found[row][apart]] < TIE


class Scores(LogitsProcessor):
    def __init__(self) -> None:
        self.recorded: list[Any] = []
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.recorded.append(input_ids.tolist())
        self.scores.append(scores.clone())
        return scores


class Calls(StoppingCriteria, BaseStreamer):
    def __init__(self) -> None:
        self.recorded: list[tuple[str, Any]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.recorded.append(("seen", (input_ids.tolist(), scores)))
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def put(self, value: torch.Tensor) -> None:
        self.recorded.append(("put", value.tolist()))

    def end(self) -> None:
        self.recorded.append(("end", None))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("name", "graphs"), [*product(["opt", "llama", "bloom"], [False, True]), ("mistral", False)])
def test_processors_criteria_and_streamers_get_the_same_arguments_as_without_shrinking(
    name: str, graphs: bool, sampled: bool, rows_run: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(name)
    settings = {"do_sample": sampled, "temperature": 0.9, "top_k": 9, "repetition_penalty": 1.3, "cuda_graphs": graphs}

    def watched() -> tuple[Calls, Scores, list[list[int]]]:
        calls, scores = Calls(), Scores()
        torch.manual_seed(5)
        rows_run.clear()
        watch = {"logits_processor": LogitsProcessorList([scores]), "streamer": calls}
        return calls, scores, decode(model, SCHEDULES[0], EndsAfter(), calls, **watch, **settings)

    leaving, fewer, text = watched()
    assert min(rows_run) < len(LENGTHS)
    monkeypatch.setattr(rows, "MAX_UNFINISHED_SHARE", 0)
    staying, all_of_them, same = watched()
    assert set(rows_run) == {len(LENGTHS)}
    assert text == same
    assert leaving.recorded == staying.recorded
    assert fewer.recorded == all_of_them.recorded
    for step, (ours, theirs) in enumerate(zip(fewer.scores, all_of_them.scores, strict=True)):
        going = [row for row, end in enumerate(TOKENS) if step < end]
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours[going], theirs[going], atol=1e-4, rtol=1e-4)


def test_graphs_run_powers_of_two_of_rows_and_the_next_call_starts_with_all_rows(rows_run: list[int]) -> None:
    for name in ("opt", "llama", "bloom"):
        expected = decode(tiny(name), SCHEDULES[0], EndsAfter(), cuda_graphs=False)
        for _ in range(3):
            rows_run.clear()
            assert decode(tiny(name), SCHEDULES[0], EndsAfter(), cuda_graphs=True) == expected
            assert rows_run == [8, 8, 8, 4, 4, 4, 4, 4, 2, 2, 2, 2, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_graphs_of_fewer_rows_on_cuda_equal_steps_without_graphs(name: str) -> None:
    model: Any = tiny(name)
    try:
        model.to("cuda")
        expected = decode(model, SCHEDULES[0], EndsAfter(), cuda_graphs=False)
        for _ in range(3):
            assert decode(model, SCHEDULES[0], EndsAfter()) == expected
    finally:
        model.to("cpu")


@pytest.mark.parametrize("asked", ["return_dict_in_generate", "output_scores", "output_logits"])
def test_no_row_leaves_where_the_caller_gets_scores_or_the_cache(asked: str, rows_run: list[int]) -> None:
    request = {asked: True, "return_dict_in_generate": True, "stopping_criteria": StoppingCriteriaList([EndsAfter()])}
    output = generate(tiny("opt"), LENGTHS, FULL, pad_token_id=PAD, **request)
    assert set(rows_run) == {len(LENGTHS)}
    assert output.past_key_values.layers[0].keys.shape[0] == len(LENGTHS)


def test_without_end_tokens_a_row_that_a_criterion_ends_stays_and_continues(rows_run: list[int]) -> None:
    criterion = EndsAfter()

    class WithoutEndToken(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return criterion(input_ids, scores)

    plain = decode(tiny("llama"), FULL)
    assert decode(tiny("llama"), FULL, WithoutEndToken()) == plain
    assert set(rows_run) == {len(LENGTHS)}


def test_the_models_own_forward_pass_runs_every_row() -> None:
    own = decode(tiny("opt"), SCHEDULES[0], EndsAfter(), cache_implementation="dynamic")
    assert own == decode(tiny("opt"), SCHEDULES[0], EndsAfter())


def test_shrinking_keeps_the_caches_buffers_and_moves_no_layer_that_has_ended() -> None:
    cache = PlannedCache(SkipSchedule(3, 2, 1, horizon=2, placement="top"), 4)  # cutoffs 4, 0, 1
    states = torch.arange(5.0)[:, None, None, None].expand(5, 1, 2, 1)
    for layer in cache.layers:
        layer.update(states, -states)
    cache.layers[0].update(states[:, :, :1] + 10, states[:, :, :1])
    bytes_before, addresses = cache.nbytes, [cache.layers[layer].keys.data_ptr() for layer in (0, 2)]
    cache.keep_rows([0, 4, 2])
    assert cache.layers[0].keys[:, 0, :3, 0].tolist() == [[0, 0, 10], [4, 4, 14], [2, 2, 12]]
    assert cache.layers[0].values[:, 0, :2, 0].tolist() == [[0, 0], [-4, -4], [-2, -2]]
    assert cache.layers[2].keys[:, 0, :2, 0].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert cache.nbytes == bytes_before
    assert [cache.layers[layer].keys.data_ptr() for layer in (0, 2)] == addresses
    cache.reset()
    assert cache.layers[0].keys.shape[0] == 5


@given(st.lists(st.booleans(), min_size=1, max_size=40).filter(any), st.booleans())
def test_all_unfinished_rows_are_kept_and_only_those_beyond_the_new_size_move(
    unfinished: list[bool], powers_of_two: bool
) -> None:
    kept = rows_to_keep(unfinished, powers_of_two=powers_of_two)
    going = {row for row, has_unfinished_sequences in enumerate(unfinished) if has_unfinished_sequences}
    if kept is None:
        return
    assert len(kept) == len(set(kept)) < len(unfinished)
    assert going <= set(kept)
    assert len(kept) in (1, 2, 4, 8, 16, 32) if powers_of_two else set(kept) == going
    assert all(row == place or (row >= len(kept) and row in going) for place, row in enumerate(kept))
