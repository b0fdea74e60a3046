"""Lossless decoding gives output identical to full depth's, in the expected number of passes."""

from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from decoding_cases import LAYERS, MODELS, Case, fresh_model
from drawn_schedules import orders
from fastpath_cases import MODELS as FAMILIES
from fastpath_cases import SCHEDULES, tiny
from hypothesis import event, given, settings
from hypothesis import strategies as st
from lossless_cases import DRAFTS, check_lossless, drafting, greedy_cases
from lossless_sampling import chi_square, sampled_counts
from peft import LoraConfig, get_peft_model
from tiny_models import END, PAD, ragged_prompts
from transformers import (
    DynamicCache,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.streamers import BaseStreamer

from skipdecode import ConfigError, PlannedCache, SkipSchedule, skip_generate
from skipdecode.generate import score_processing
from skipdecode.generate.fast_path import FastPath, fast_path
from skipdecode.generate.lossless_loop import DraftCounts
from skipdecode.generate.runners import LosslessRunner
from skipdecode.kernels.cpu import kernels

FULL = SkipSchedule.full_depth(LAYERS)
LENGTHS = [3, 12, 5, 7]


@settings(max_examples=80, derandomize=True, database=None)
@given(greedy_cases(), st.sampled_from(DRAFTS), st.booleans())
def test_output_is_identical_to_full_depths_for_any_batch_and_any_drafts(
    case: Case, drafts: int | str, double: bool
) -> None:
    event(f"near ties: {check_lossless(case, drafts, double=double)}")


class Watcher(StoppingCriteria, BaseStreamer):
    """A criterion and a streamer that record their calls; the criterion ends each sequence at a length."""

    eos_token_id = 0  # as transformers' criterion for end tokens has one

    def __init__(self, ends: list[int]) -> None:
        self.ends = torch.tensor(ends)
        self.seen: list[Any] = []
        self.streamed: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append((input_ids.tolist(), None if scores is None else len(scores)))
        return self.ends <= input_ids.shape[1]

    def put(self, value: torch.Tensor) -> None:
        self.streamed.append(value.tolist())

    def end(self) -> None:
        self.streamed.append("end")


def both(name: str, draft: SkipSchedule, lengths: list[int], ends: list[int] | None = None, **request: Any) -> Any:
    """The outputs of transformers and of lossless decoding, each with the calls that a watcher recorded."""
    drafts, counts = request.pop("drafts", 3), request.pop("draft_counts", None)
    lossless = {"custom_generate": skip_generate, "schedule": draft, "lossless": True, "draft_counts": counts}
    ids, mask = ragged_prompts(lengths, 4)
    found = []
    for how in ({}, lossless):
        watcher = Watcher(ends or [1000] * len(lengths))
        watch: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList([watcher])} if ends is not None else {}
        if len(lengths) == 1:
            watch["streamer"] = watcher
        settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD, **request}
        with drafting(drafts):
            output = tiny(name).generate(input_ids=ids, attention_mask=mask, **watch, **settings, **how)
        found.append((output, (watcher.seen, watcher.streamed)))
    return found


@pytest.mark.parametrize("lengths", [[6], LENGTHS], ids=["alone", "batch"])
@pytest.mark.parametrize("name", FAMILIES)
def test_scores_logits_and_tokens_equal_those_of_transformers(name: str, lengths: list[int]) -> None:
    handed_out = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ends = [15, 30, 15, 18][: len(lengths)]
    request = {"repetition_penalty": 1.3, "min_new_tokens": 4, "eos_token_id": [END, 7, 11]}
    (theirs, seen), (ours, also_seen) = both(name, SCHEDULES[0], lengths, ends, **handed_out, **request)
    assert torch.equal(ours.sequences, theirs.sequences)
    for values, expected in ((ours.scores, theirs.scores), (ours.logits, theirs.logits)):
        torch.testing.assert_close(torch.stack(values), torch.stack(expected), atol=1e-4, rtol=0)
    assert also_seen == seen


def test_the_returned_cache_holds_full_depths_keys_and_values() -> None:
    (theirs, _), (ours, _) = both("llama", SCHEDULES[0], [6, 6], return_dict_in_generate=True)
    assert isinstance(ours.past_key_values, PlannedCache)
    for layer, other in zip(ours.past_key_values.layers, theirs.past_key_values.layers, strict=True):
        length = layer.get_seq_length()
        assert length == other.get_seq_length() == 25
        torch.testing.assert_close(layer.keys[:, :, :length], other.keys, atol=1e-4, rtol=0)
        torch.testing.assert_close(layer.values[:, :, :length], other.values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("ends", [[18, 30, 15, 20], [40, 14, 40, 40]], ids=["each", "one"])
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_criteria_are_called_as_by_transformers(name: str, ends: list[int]) -> None:
    (theirs, seen), (ours, also_seen) = both(name, SCHEDULES[2], LENGTHS, ends)
    assert torch.equal(ours, theirs)
    assert also_seen == seen


@pytest.mark.parametrize(
    "request_",
    [
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [6, 7]]},
        {"forced_eos_token_id": END, "eos_token_id": END},
        {"exponential_decay_length_penalty": (4, 1.4), "eos_token_id": END},
        {"suppress_tokens": list(range(4, 20)), "renormalize_logits": True},
        {"prefix_allowed_tokens_fn": lambda row, text: list(range(4 + row * 7, 30 + row * 7))},
    ],
    ids=lambda request: next(iter(request)),
)
def test_processors_see_each_sequence_at_its_own_length(request_: dict[str, Any]) -> None:
    (theirs, _), (ours, _) = both("qwen2", SCHEDULES[0], LENGTHS, **request_)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("lengths", [[6], LENGTHS], ids=["alone", "batch"])
def test_prefix_allowed_tokens_fn_is_called_with_allowed_sequences_only(lengths: list[int]) -> None:
    """A trie raises for a sequence that it doesn't contain, such as one of another length."""
    prompt = max(lengths)

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        new = ids[prompt:].tolist()
        assert all(token in following(row, before) for before, token in pairwise([0, *new])), "no such sequence"
        return following(row, new[-1] if new else 0)

    def following(row: int, token: int) -> list[int]:
        return [4 + (3 * token + 5 * row + n) % 50 for n in range(3)]

    (theirs, _), (ours, _) = both("llama", SCHEDULES[0], lengths, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("lengths", [[6], LENGTHS], ids=["alone", "batch"])
def test_drafts_that_are_always_right_are_all_accepted_and_counted(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FastPath, "draft_decoder", lambda fast, decoder, layers: decoder)  # as exact as full depth
    counts = DraftCounts()
    (theirs, _), (ours, _) = both("opt", FULL, lengths, max_new_tokens=12, drafts=4, draft_counts=counts)
    assert torch.equal(ours, theirs)
    drafts = 8 * len(lengths)  # 5 + 5 + 1 tokens follow the prompt's
    assert counts == DraftCounts(rounds=3, drafted=drafts, taken=drafts, layers=11 * LAYERS)


@pytest.mark.parametrize("lengths", [[6], LENGTHS], ids=["alone", "batch"])
def test_drafts_that_are_always_wrong_leave_the_output_and_the_number_of_verifications_unchanged(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LosslessRunner.run

    def wrong(self: Any, tokens: Any, starts: Any, counts: Any, layers: Any = None) -> torch.Tensor:
        logits = run(self, tokens, starts, counts, layers)
        return logits if layers is None else -logits

    monkeypatch.setattr(LosslessRunner, "run", wrong)
    for name in ("choose", "draft"):
        monkeypatch.setattr(LosslessRunner, name, lambda *_: None)
    counts = DraftCounts()
    (theirs, _), (ours, _) = both("opt", SCHEDULES[0], lengths, draft_counts=counts)
    assert torch.equal(ours, theirs)
    assert (counts.rounds, counts.taken) == (19, 0)
    assert counts.drafted > 0
    assert 19 * LAYERS < counts.layers < (19 + counts.drafted) * LAYERS


def test_a_call_for_one_token_drafts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("draft_record", "draft_decoder"):
        monkeypatch.setattr(FastPath, name, lambda *_, **__: pytest.fail("a draft was prepared"))
    (theirs, _), (ours, _) = both("opt", FULL, LENGTHS, max_new_tokens=1)
    assert torch.equal(ours, theirs)


@pytest.mark.skipif(kernels() is None, reason="needs the compiled kernels")
def test_drafts_run_8_bit_copies_of_their_layers_if_these_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deepcopy(fresh_model("llama"))
    packed = fast_path(model).decoder("packed")
    drafter = fast_path(model).draft_decoder(packed, (0, 5))
    assert drafter.weights == "int8"
    assert drafter.runs((0, 5))
    assert not drafter.runs((0, 4, 5))
    assert fast_path(model).draft_decoder(packed, (0,)) is drafter
    more = fast_path(model).draft_decoder(packed, (0, 4, 5))
    assert more.runs((0, 4, 5))
    assert more.layers[5] is drafter.layers[5], "a copy is made once"
    monkeypatch.setattr("skipdecode.generate.fast_path.free_memory", lambda: 0.0)
    assert fast_path(model).draft_decoder(packed, (0, 3)) is packed
    for weights in ("model", "int8", "int4"):
        own = fast_path(model).decoder(weights)
        assert fast_path(model).draft_decoder(own, (0,)) is own


def test_no_padding_token_is_needed_if_no_token_ends_a_sequence() -> None:
    model: Any = deepcopy(fresh_model("llama"))
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = None
    ids, _ = ragged_prompts([5, 5], 4)
    request = {"max_new_tokens": 9, "do_sample": False}
    ours = model.generate(ids, custom_generate=skip_generate, schedule=SCHEDULES[0], lossless=True, **request)
    assert torch.equal(ours, model.generate(ids, **request))


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_sampled_output_has_full_depths_distribution(name: str) -> None:
    assert chi_square(*sampled_counts(name, SCHEDULES[0], rows=200, calls=5)) > 1e-3


def test_accepting_every_draft_is_found_to_change_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)
    assert chi_square(*sampled_counts("llama", SCHEDULES[0], rows=200, calls=5)) < 1e-9


def test_drafts_sampled_from_full_depths_distribution_are_all_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FastPath, "draft_decoder", lambda fast, decoder, layers: decoder)
    counts = DraftCounts()
    sampled_counts("opt", FULL, rows=50, calls=1, draft_counts=counts)
    assert counts.taken == counts.drafted == 2 * 50


def test_a_seed_gives_the_same_output_again_however_processors_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    def sampled(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        (_, _), (ours, _) = both("phi", SCHEDULES[0], LENGTHS, do_sample=True, temperature=2.0)
        return ours.tolist()  # type: ignore[no-any-return]

    tiny("phi")  # creating a model draws random numbers, too
    once = sampled(1)
    assert once != sampled(2)
    monkeypatch.setattr(score_processing, "_READ_SCORES_ONLY", ())  # apply them per length, as other processors
    assert once == sampled(1)


WATERMARK = SynthIDTextWatermarkingConfig(keys=[654, 400], ngram_len=5)
GUIDANCE = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.7, tiny("llama"))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"lossless": "yes"}, "lossless is 'yes': it must be True or False"),
        ({"cache_implementation": "dynamic"}, "can't draft and verify: a cache was given"),
        ({"past_key_values": DynamicCache()}, "can't draft and verify: a cache was given"),
        ({"cuda_graphs": True}, "cuda_graphs is True: lossless decoding has no CUDA graphs"),
        ({"num_beams": 2}, "num_beams is 2"),
        ({"guidance_scale": 1.5}, "the logits processor of guidance_scale keeps state between its calls"),
        ({"watermarking_config": WATERMARK}, "the logits processor of a SynthID watermark keeps state between"),
        ({"logits_processor": [GUIDANCE]}, "the logits processor of guidance_scale keeps state between its calls"),
        ({"schedule": None}, "without a schedule or a speedup, and this model.s config names no speed"),
        ({"lossless": False, "draft_counts": DraftCounts()}, "draft_counts is given without lossless=True"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_an_unsupported_lossless_call_is_refused_with_the_reason(request_: dict[str, Any], message: str) -> None:
    ids, mask = ragged_prompts([4], 4)
    request = {"custom_generate": skip_generate, "schedule": SCHEDULES[0], "lossless": True, **request_}
    with pytest.raises(ConfigError, match=message):
        tiny("llama").generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, **request)


def test_unmerged_adapters_are_refused() -> None:
    model = get_peft_model(deepcopy(fresh_model("llama")), LoraConfig(target_modules=["q_proj"])).eval()
    ids, mask = ragged_prompts([4], 4)
    request = {"custom_generate": skip_generate, "schedule": SCHEDULES[0], "lossless": True}
    with pytest.raises(ConfigError, match=r"can't draft and verify: .*q_proj"):
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, **request)


def test_the_random_cases_include_every_family() -> None:
    assert set(FAMILIES) < set(MODELS)


@settings(max_examples=20, derandomize=True, database=None)
@given(orders(LAYERS), st.sampled_from(["llama", "opt", "gpt2"]), st.integers(0, 99))
def test_an_untrained_model_drafts_by_an_order_of_its_layers(order: tuple[int, ...], name: str, seed: int) -> None:
    model = fresh_model(name)
    ids, mask = ragged_prompts([4, 9], seed)
    request: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **request)
    found = model.generate(ids, **request, custom_generate=skip_generate, lossless=True, order=order)
    assert torch.equal(found, expected)
    for candidate in fast_path(model).solved().draft_candidates(order):
        assert set(candidate.layers_at(0)) == set(order[: candidate.max_layers])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"order": range(LAYERS)}, "order is given without lossless=True"),
        ({"order": range(LAYERS), "lossless": True, "schedule": FULL}, "beside a schedule or a speedup"),
        ({"order": range(LAYERS), "lossless": True, "speedup": 2}, "beside a schedule or a speedup"),
        ({"order": [0, 1], "lossless": True}, "order has 2 layers: it must have each of the model's 6 once"),
        ({"order": "012345", "lossless": True}, "order is '012345': it must be a list of layer indices"),
    ],
)
def test_an_invalid_or_superfluous_order_is_refused(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fresh_model("llama").generate(torch.tensor([[5, 6]]), custom_generate=skip_generate, **request_)
