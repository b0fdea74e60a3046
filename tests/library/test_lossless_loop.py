"""What a schedule drafts and full depth verifies is full depth's own text, in as few passes as it allows."""

from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from decoding_cases import LAYERS, MODELS, Case, fresh_model
from drawn_orders import orders
from hypothesis import event, given, settings
from hypothesis import strategies as st
from lean_cases import MODELS as FAMILIES
from lean_cases import SCHEDULES, tiny
from lossless_cases import DRAFTS, check_lossless, drafting, greedy_cases
from lossless_sampling import chi_square, sampled_texts
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
def test_any_draft_of_any_batch_is_corrected_to_full_depths_text(case: Case, drafts: int | str, double: bool) -> None:
    event(f"near ties: {check_lossless(case, drafts, double=double)}")


class Watcher(StoppingCriteria, BaseStreamer):
    """A criterion and a streamer that note what they are called with; the criterion ends each row at a length."""

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
    """What transformers gives by itself, and what lossless decoding gives; with what a watcher saw of each."""
    drafts = request.pop("drafts", 3)
    ids, mask = ragged_prompts(lengths, 4)
    found = []
    for how in ({}, {"custom_generate": skip_generate, "schedule": draft, "lossless": True}):
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
def test_scores_logits_and_texts_are_transformers_own(name: str, lengths: list[int]) -> None:
    handed_out = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ends = [15, 30, 15, 18][: len(lengths)]
    request = {"repetition_penalty": 1.3, "min_new_tokens": 4, "eos_token_id": [END, 7, 11]}
    (theirs, seen), (ours, also_seen) = both(name, SCHEDULES[0], lengths, ends, **handed_out, **request)
    assert torch.equal(ours.sequences, theirs.sequences)
    for values, expected in ((ours.scores, theirs.scores), (ours.logits, theirs.logits)):
        torch.testing.assert_close(torch.stack(values), torch.stack(expected), atol=1e-4, rtol=0)
    assert also_seen == seen


def test_the_cache_that_is_handed_out_is_full_depths() -> None:
    (theirs, _), (ours, _) = both("llama", SCHEDULES[0], [6, 6], return_dict_in_generate=True)
    assert isinstance(ours.past_key_values, PlannedCache)
    for layer, other in zip(ours.past_key_values.layers, theirs.past_key_values.layers, strict=True):
        columns = layer.get_seq_length()
        assert columns == other.get_seq_length() == 25
        torch.testing.assert_close(layer.keys[:, :, :columns], other.keys, atol=1e-4, rtol=0)
        torch.testing.assert_close(layer.values[:, :, :columns], other.values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("ends", [[18, 30, 15, 20], [40, 14, 40, 40]], ids=["each", "one"])
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_what_looks_on_is_called_as_by_transformers(name: str, ends: list[int]) -> None:
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
def test_processors_see_each_row_at_its_own_length(request_: dict[str, Any]) -> None:
    (theirs, _), (ours, _) = both("qwen2", SCHEDULES[0], LENGTHS, **request_)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("lengths", [[6], LENGTHS], ids=["alone", "batch"])
def test_allowed_tokens_are_asked_for_behind_texts_that_are_allowed(lengths: list[int]) -> None:
    """A trie raises where it doesn't know the text, as of a row that stands elsewhere."""
    prompt = max(lengths)

    def allowed(row: int, text: torch.Tensor) -> list[int]:
        new = text[prompt:].tolist()
        assert all(token in following(row, before) for before, token in pairwise([0, *new])), "a text that nobody has"
        return following(row, new[-1] if new else 0)

    def following(row: int, token: int) -> list[int]:
        return [4 + (3 * token + 5 * row + n) % 50 for n in range(3)]

    (theirs, _), (ours, _) = both("llama", SCHEDULES[0], lengths, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(ours, theirs)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Of each pass behind the prompt, how many layers it ran, and how many columns of each row."""
    found: list[tuple[int, list[int]]] = []
    run, choose, draft = LosslessRunner.run, LosslessRunner.choose, LosslessRunner.draft

    def noted(self: Any, tokens: Any, starts: Any, counts: Any, layers: Any = None) -> torch.Tensor:
        found.append((len(layers or self.all_layers), list(counts)))
        return run(self, tokens, starts, counts, layers)

    def noted_steps(self: Any, texts: Any, steps: int) -> Any:
        chosen = choose(self, texts, steps)
        for n in range(max(chosen.counts) if chosen is not None else 0):
            found.append((LAYERS, [int(count > n) for count in chosen.counts]))
        return chosen

    def noted_rounds(self: Any, texts: Any, layers: Any, *rest: Any) -> Any:
        drafted = draft(self, texts, layers, *rest)
        for counts, agreed in zip(*drafted[1:3], strict=True) if drafted is not None else ():
            for n in range(max(counts)):
                found.append((len(layers[n]), [int(count > n) for count in counts]))
            found.append((LAYERS, [0 if same < 0 else 1 + count for count, same in zip(counts, agreed, strict=True)]))
        return drafted

    monkeypatch.setattr(LosslessRunner, "run", noted)
    monkeypatch.setattr(LosslessRunner, "choose", noted_steps)
    monkeypatch.setattr(LosslessRunner, "draft", noted_rounds)
    return found


@pytest.mark.parametrize("lengths", [[6], LENGTHS], ids=["alone", "batch"])
def test_a_draft_that_is_never_wrong_is_taken_whole(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch, passes: list[tuple[int, list[int]]]
) -> None:
    monkeypatch.setattr(FastPath, "draft_decoder", lambda fast, decoder, layers: decoder)  # as exact as full depth
    (theirs, _), (ours, _) = both("opt", FULL, lengths, max_new_tokens=12, drafts=4)
    assert torch.equal(ours, theirs)
    rows = len(lengths)
    one_round = [(LAYERS, [1] * rows)] * 4 + [(LAYERS, [5] * rows)]
    assert passes == [*one_round, *one_round, (LAYERS, [1] * rows)]  # 5 + 5 + 1 tokens follow the prompt's


@pytest.mark.parametrize("lengths", [[6], LENGTHS], ids=["alone", "batch"])
def test_a_draft_that_is_always_wrong_costs_nothing_but_time(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch, passes: list[tuple[int, list[int]]]
) -> None:
    run = LosslessRunner.run

    def wrong(self: Any, tokens: Any, starts: Any, counts: Any, layers: Any = None) -> torch.Tensor:
        logits = run(self, tokens, starts, counts, layers)
        return logits if layers is None else -logits

    monkeypatch.setattr(LosslessRunner, "run", wrong)
    for name in ("choose", "draft"):
        monkeypatch.setattr(LosslessRunner, name, lambda *_: None)
    (theirs, _), (ours, _) = both("opt", SCHEDULES[0], lengths)
    assert torch.equal(ours, theirs)
    assert sum(layers == LAYERS for layers, _ in passes) == 19


def test_a_prompt_alone_asks_for_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("draft_record", "draft_decoder"):
        monkeypatch.setattr(FastPath, name, lambda *_, **__: pytest.fail("something drafts"))
    (theirs, _), (ours, _) = both("opt", FULL, LENGTHS, max_new_tokens=1)
    assert torch.equal(ours, theirs)


@pytest.mark.skipif(kernels() is None, reason="needs the compiled kernels")
def test_drafts_run_copies_of_their_layers_in_8_bits_where_these_read_less(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deepcopy(fresh_model("llama"))
    packed = fast_path(model).decoder("packed")
    drafter = fast_path(model).draft_decoder(packed, (0, 5))
    assert drafter.weights == "int8"
    assert drafter.runs((0, 5))
    assert not drafter.runs((0, 4, 5))
    assert fast_path(model).draft_decoder(packed, (0,)) is drafter
    more = fast_path(model).draft_decoder(packed, (0, 4, 5))
    assert more.runs((0, 4, 5))
    assert more.blocks[5] is drafter.blocks[5], "a copy is made once"
    monkeypatch.setattr("skipdecode.generate.fast_path.free_memory", lambda: 0.0)
    assert fast_path(model).draft_decoder(packed, (0, 3)) is packed
    for weights in ("model", "int8", "int4"):
        own = fast_path(model).decoder(weights)
        assert fast_path(model).draft_decoder(own, (0,)) is own


def test_no_padding_is_asked_for_where_no_token_ends_a_text() -> None:
    model: Any = deepcopy(fresh_model("llama"))
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = None
    ids, _ = ragged_prompts([5, 5], 4)
    request = {"max_new_tokens": 9, "do_sample": False}
    ours = model.generate(ids, custom_generate=skip_generate, schedule=SCHEDULES[0], lossless=True, **request)
    assert torch.equal(ours, model.generate(ids, **request))


def test_passes_and_drafts_are_counted(passes: list[tuple[int, list[int]]]) -> None:
    counts = DraftCounts()
    ids, mask = ragged_prompts(LENGTHS, 4)
    request = {"custom_generate": skip_generate, "schedule": SCHEDULES[2], "lossless": True, "draft_counts": counts}
    with drafting("ragged"):
        tiny("llama").generate(input_ids=ids, attention_mask=mask, max_new_tokens=20, eos_token_id=None, **request)
    verified = [sum(columns) - sum(map(bool, columns)) for layers, columns in passes if layers == LAYERS]
    assert counts.rounds == len(verified)
    assert counts.drafted == sum(verified)
    assert counts.layers == sum(layers for layers, _ in passes)
    # A round gives each row that goes on a token of full depth's, and the drafts that were taken.
    given = sum(sum(map(bool, columns)) for layers, columns in passes if layers == LAYERS)
    assert counts.taken == len(LENGTHS) * 19 - given > 0


def test_a_row_alone_decodes_what_it_does_in_a_batch() -> None:
    ids, mask = ragged_prompts(LENGTHS, 4)
    request = {"custom_generate": skip_generate, "schedule": SCHEDULES[0], "lossless": True, "eos_token_id": None}
    with drafting(3):
        whole = tiny("gemma").generate(input_ids=ids, attention_mask=mask, max_new_tokens=16, **request)
    for row, length in enumerate(LENGTHS):
        prompt, seen = ids[row : row + 1, -length:], mask[row : row + 1, -length:]
        alone = tiny("gemma").generate(input_ids=prompt, attention_mask=seen, max_new_tokens=16, **request)
        assert torch.equal(alone[0, length:], whole[row, max(LENGTHS) :])


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_sampled_texts_have_full_depths_distribution(name: str) -> None:
    assert chi_square(*sampled_texts(name, SCHEDULES[0], rows=200, calls=5)) > 1e-3


def test_drafts_that_are_all_kept_have_another_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)
    assert chi_square(*sampled_texts("llama", SCHEDULES[0], rows=200, calls=5)) < 1e-9


def test_a_draft_from_full_depths_own_distribution_is_taken_whole(
    monkeypatch: pytest.MonkeyPatch, passes: list[tuple[int, list[int]]]
) -> None:
    monkeypatch.setattr(FastPath, "draft_decoder", lambda fast, decoder, layers: decoder)
    sampled_texts("opt", FULL, rows=50, calls=1)
    assert passes == [(LAYERS, [1] * 50)] * 2 + [(LAYERS, [3] * 50)]


def test_a_seed_gives_the_same_text_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def sampled(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        (_, _), (ours, _) = both("phi", SCHEDULES[0], LENGTHS, do_sample=True, temperature=2.0)
        return ours.tolist()  # type: ignore[no-any-return]

    tiny("phi")  # the making of a model draws numbers, too
    once = sampled(1)
    assert once != sampled(2)
    monkeypatch.setattr(score_processing, "_READ_SCORES_ONLY", ())  # each length by itself, as other processors need it
    assert once == sampled(1)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"lossless": "yes"}, "lossless is 'yes': it must be True or False"),
        ({"cache_implementation": "dynamic"}, "can't draft and verify: a cache was given"),
        ({"past_key_values": DynamicCache()}, "can't draft and verify: a cache was given"),
        ({"cuda_graphs": True}, "cuda_graphs is True: lossless decoding has no CUDA graphs"),
        ({"num_beams": 2}, "num_beams is 2"),
        ({"guidance_scale": 1.5}, "the logits processor of guidance_scale keeps state between its calls"),
        (
            {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400], ngram_len=5)},
            "the logits processor of a SynthID watermark keeps state between its calls",
        ),
        (
            {"logits_processor": [UnbatchedClassifierFreeGuidanceLogitsProcessor(1.7, tiny("llama"))]},
            "the logits processor of guidance_scale keeps state between its calls",
        ),
        ({"schedule": None}, "without a schedule or a speedup, and this model.s config names no speed"),
        ({"lossless": False, "draft_counts": DraftCounts()}, "draft_counts is given without lossless=True"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_what_it_cannot_do_is_refused_by_name(request_: dict[str, Any], message: str) -> None:
    ids, mask = ragged_prompts([4], 4)
    request = {"custom_generate": skip_generate, "schedule": SCHEDULES[0], "lossless": True, **request_}
    with pytest.raises(ConfigError, match=message):
        tiny("llama").generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, **request)


def test_adapters_that_are_not_merged_are_refused() -> None:
    model = get_peft_model(deepcopy(fresh_model("llama")), LoraConfig(target_modules=["q_proj"])).eval()
    ids, mask = ragged_prompts([4], 4)
    request = {"custom_generate": skip_generate, "schedule": SCHEDULES[0], "lossless": True}
    with pytest.raises(ConfigError, match=r"can't draft and verify: .*q_proj"):
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, **request)


def test_all_models_are_drawn() -> None:
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
def test_an_order_that_cannot_draft_is_refused(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fresh_model("llama").generate(torch.tensor([[5, 6]]), custom_generate=skip_generate, **request_)
