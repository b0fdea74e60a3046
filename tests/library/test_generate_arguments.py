"""Every argument of generate either works as in transformers' own loops, or is refused."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from decoding_cases import fresh_model
from fastpath_cases import fresh, tiny
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from tiny_models import END, ragged_prompts, randomised, tiny_config, tiny_opt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, MaxLengthCriteria, PreTrainedModel, PreTrainedTokenizerFast, StaticCache

from skipdecode import ConfigError, SkipSchedule, skip_generate
from skipdecode.families import FAMILIES, register_family

SCHEDULE = SkipSchedule(6, 4, 2, horizon=5)
FULL = SkipSchedule.full_depth(6)
FAMILY_NAMES = ["opt", "gpt2", "bloom", "gpt_neox", "llama", "mistral", "phi"]


def output_of(model: Any, schedule: SkipSchedule | None, **request: Any) -> torch.Tensor:
    """The output of `generate`: under a schedule, or transformers' own if that is None."""
    request = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, **request}
    if schedule is not None:
        request |= {"custom_generate": skip_generate, "schedule": schedule}
    output: torch.Tensor = model.generate(**request)
    return output


@pytest.mark.parametrize("lengths", [[6, 6], [3, 6]], ids=["without padding", "with padding"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_prompt_of_embeddings_gives_the_output_of_its_tokens(name: str, lengths: list[int]) -> None:
    model = tiny(name)
    ids, mask = ragged_prompts(lengths, 6)
    embeds = model.get_input_embeddings()(ids).detach()
    for schedule in (SCHEDULE, FULL):
        expected = output_of(model, schedule, input_ids=ids, attention_mask=mask)[:, 6:]
        assert torch.equal(output_of(model, schedule, inputs_embeds=embeds, attention_mask=mask), expected)
        both = output_of(model, schedule, inputs_embeds=embeds, input_ids=ids, attention_mask=mask)
        assert torch.equal(both[:, 6:], expected)
    if lengths == [6, 6]:
        unmasked = output_of(model, FULL, inputs_embeds=embeds)
        assert torch.equal(unmasked, expected)
    assert torch.equal(expected, output_of(model, None, inputs_embeds=embeds, attention_mask=mask))


def test_a_prompt_of_embeddings_longer_than_the_models_positions_is_refused() -> None:
    model = tiny("opt")
    embeds = model.get_input_embeddings()(ragged_prompts([90], 1)[0]).detach()
    with pytest.raises(ConfigError, match="the longest prompt has 90 tokens, 99 positions are needed"):
        output_of(model, FULL, inputs_embeds=embeds)


@pytest.mark.parametrize("name", ["opt", "gpt2", "llama", "gpt_neox", "phi"])
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "dynamic"}], ids=["planned", "dynamic"])
def test_position_ids_continue_after_the_prompt(name: str, cache: dict[str, Any]) -> None:
    model = tiny(name)
    ids, _ = ragged_prompts([6, 6], 6)
    places = torch.tensor([[0, 2, 4, 6, 8, 10], [5, 6, 7, 8, 9, 30]])
    theirs = output_of(model, None, input_ids=ids, position_ids=places)
    assert not torch.equal(theirs, output_of(model, None, input_ids=ids))
    assert torch.equal(output_of(model, FULL, input_ids=ids, position_ids=places, **cache), theirs)


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "dynamic"}], ids=["planned", "dynamic"])
def test_token_types_continue_after_the_prompt(cache: dict[str, Any]) -> None:
    model = tiny("gpt2")
    ids, mask = ragged_prompts([3, 6], 6)
    types = torch.full_like(ids, 17)
    request = {"input_ids": ids, "attention_mask": mask}
    theirs = output_of(model, None, **request, token_type_ids=types)
    assert not torch.equal(theirs, output_of(model, None, **request))
    assert torch.equal(output_of(model, FULL, **request, token_type_ids=types, **cache), theirs)


@pytest.mark.parametrize("placement", ["top", "bottom", "ends"])
@pytest.mark.parametrize("name", ["qwen2, slides next", "qwen3, slides first"])
def test_sliding_and_full_layers_give_the_same_output_with_every_kind_of_cache(name: str, placement: Any) -> None:
    check_every_cache(fresh_model(name), placement)


@pytest.mark.parametrize("model_type", ["olmo3", "exaone4"])
def test_a_registered_family_gives_the_same_output_with_every_kind_of_cache(model_type: str) -> None:
    sizes = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5}
    types = ["sliding_attention", "full_attention", "full_attention"] * 2  # the first layer slides
    config = tiny_config(model_type, **sizes, layer_types=types)
    register_family(model_type, "model.layers")
    try:
        check_every_cache(randomised(config, seed=2), "top")
    finally:
        del FAMILIES[model_type]


def check_every_cache(model: PreTrainedModel, placement: Any) -> None:
    ids, mask = ragged_prompts([4, 9], 6)
    request = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 14}
    for prompt in ("full", "max"):
        schedule = SkipSchedule(6, 4, 2, horizon=5, placement=placement, prompt=prompt)
        planned = output_of(model, schedule, **request)
        for cache in (
            {"cache_implementation": "dynamic"},
            {"cache_implementation": "static"},
            {"past_key_values": DynamicCache(config=model.config)},
            {"past_key_values": StaticCache(config=model.config, max_cache_len=23)},
            {"past_key_values": DynamicCache()},
        ):
            assert torch.equal(output_of(model, schedule, **request, **cache), planned), cache
            given = cache.get("past_key_values")
            assert given is None or not {"get_mask_sizes", "get_query_offset"} & set(vars(given))
    assert torch.equal(output_of(model, FULL, **request), output_of(model, None, **request))


@pytest.mark.parametrize(
    "tuning",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_prompt_tuning_is_refused(tuning: Any) -> None:
    model = get_peft_model(fresh("llama"), tuning)
    ids, mask = ragged_prompts([3, 6], 6)
    with pytest.raises(ConfigError, match="prompt tuning adds virtual tokens"):
        output_of(model, SCHEDULE, input_ids=ids, attention_mask=mask)


def test_adapters_decode_under_a_schedule_and_leave_the_model_unchanged() -> None:
    model = fresh("llama")
    ids, mask = ragged_prompts([3, 6], 6)
    before = output_of(model, SCHEDULE, input_ids=ids, attention_mask=mask)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False))
    changed = output_of(adapted, SCHEDULE, input_ids=ids, attention_mask=mask)
    assert not torch.equal(before, changed)
    assert torch.equal(output_of(adapted.unload(), SCHEDULE, input_ids=ids, attention_mask=mask), before)


@pytest.mark.parametrize("name", ["opt", "llama", "mistral"])
def test_guidance_gives_the_same_output_on_the_fast_path_and_at_full_depth_that_of_generate(name: str) -> None:
    model = tiny(name)
    ids, mask = ragged_prompts([6], 6)
    request = {"input_ids": ids, "attention_mask": mask, "guidance_scale": 1.7, "max_new_tokens": 14}
    fast = output_of(model, SCHEDULE, **request)
    assert not torch.equal(fast, output_of(model, SCHEDULE, **{**request, "guidance_scale": None}))
    assert torch.equal(fast, output_of(model, SCHEDULE, **request, cache_implementation="dynamic"))
    assert torch.equal(output_of(model, FULL, **request), output_of(model, None, **request))


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are letters, and some pairs of them."""
    words = [*"_!.?", *(chr(ord("a") + n) for n in range(26)), *(chr(ord("A") + n) for n in range(26))]
    words += ["ab", "cd", "ef", "gh", "Ab"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"bos_token": "?", "pad_token": "!", "eos_token": "?", "unk_token": "_"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_stop_strings_end_sequences_with_the_tokenizer_passed_to_generate() -> None:
    model = tiny("opt")
    ids, mask = ragged_prompts([3, 6], 6)
    tokenizer = letters()
    plain = output_of(model, FULL, input_ids=ids, attention_mask=mask, max_new_tokens=20)
    stop = tokenizer.convert_ids_to_tokens(int(plain[0, 10]))
    request = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 20, "stop_strings": [stop]}
    request |= {"tokenizer": tokenizer, "eos_token_id": END}
    theirs = output_of(model, None, **request)
    assert torch.equal(output_of(model, FULL, **request), theirs)
    assert theirs.shape[1] <= plain.shape[1]
    assert set(theirs[0, 11:].tolist()) <= {1}  # the row stopped there
    skipped = output_of(model, SCHEDULE, input_ids=ids[1:], max_new_tokens=20)
    stop = tokenizer.convert_ids_to_tokens(int(skipped[0, 9]))
    first = skipped[0, 6:].tolist().index(int(skipped[0, 9]))
    stopped = output_of(model, SCHEDULE, input_ids=ids[1:], max_new_tokens=20, stop_strings=stop, tokenizer=tokenizer)
    assert torch.equal(stopped, skipped[:, : 6 + first + 1])


def test_token_healing_gives_the_output_of_generate() -> None:
    model = tiny("opt")
    tokenizer = letters()
    ids = torch.tensor([[10, 12, 4]])  # it ends in "a", which is the start of "ab"
    request = {"input_ids": ids, "token_healing": True, "tokenizer": tokenizer}
    assert torch.equal(output_of(model, FULL, **request), output_of(model, None, **request))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search is requested"),
        ({"dola_layers": "low"}, "dola generation is requested"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation is requested"),
        ({"assistant_model": tiny_opt("opt", 2)}, "assisted generation is requested"),
        ({"schedule": "3x"}, "schedule is a str: pass a SkipSchedule"),
        ({"schedule": {**SCHEDULE.to_dict(), "horizn": 3}}, "horizn"),
        ({"speedup": 2}, "both schedule and speedup are given"),
        ({"schedule": None, "speedup": 2, "over": ["all"]}, r"over .*\['all'\]"),
        ({"schedule": None, "speedup": [3]}, r"speedup is \[3\]: it must be a number of at least 1"),
        ({"schedule": None, "speedup": "3"}, "speedup is '3': it must be a number of at least 1"),
        ({"schedule": None, "speedup": 0.5}, "speedup is 0.5: it must be a number of at least 1"),
        ({"schedule": None, "speedup": math.nan}, "speedup is nan: it must be a number of at least 1"),
    ],
)
def test_an_unsupported_mode_or_value_is_refused(change: dict[str, Any], message: str) -> None:
    ids, mask = ragged_prompts([6], 6)
    request = {"input_ids": ids, "attention_mask": mask, "schedule": SCHEDULE, **change}
    with pytest.raises(ConfigError, match=message):
        tiny("opt").generate(**request, max_new_tokens=3, custom_generate=skip_generate)


OPTIONS: list[dict[str, Any]] = [{}, {"weights": "model"}, {"cuda_graphs": True}, {"lossless": True}]


@pytest.mark.parametrize("how", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["opt", "llama"])
@pytest.mark.parametrize("limit", [1, 6, 9, 60])
def test_a_callers_own_length_criterion_replaces_that_of_generate(limit: int, name: str, how: dict[str, Any]) -> None:
    """A longer limit needs a larger cache: kernels would write past the end of one for max_new_tokens."""
    model = tiny(name)
    ids, mask = ragged_prompts([3, 6], 6)
    given = {"input_ids": ids, "attention_mask": mask, "stopping_criteria": [MaxLengthCriteria(limit)]}
    theirs = output_of(model, None, **given)
    assert theirs.shape[1] == max(limit, 6 + 1)  # the first token is generated before any limit is checked
    assert torch.equal(output_of(model, SCHEDULE if how.get("lossless") else FULL, **how, **given), theirs)


@pytest.mark.parametrize("how", OPTIONS, ids=str)
def test_a_mask_whose_length_differs_from_the_prompts_is_refused(how: dict[str, Any]) -> None:
    mask = torch.tensor([[0] + [1] * 11])  # generate drops one that hides nothing
    given = {"input_ids": torch.full((1, 6), 5), "attention_mask": mask}
    with pytest.raises(ConfigError, match="attention_mask has 12 positions and the prompt 6: they must agree"):
        output_of(tiny("opt"), SCHEDULE, **how, **given)


def test_a_callers_own_length_criterion_beyond_the_models_positions_is_refused() -> None:
    ids, _ = ragged_prompts([6], 6)
    with pytest.raises(ConfigError, match="the longest prompt has 6 tokens, 193 positions are needed"):
        output_of(tiny("opt"), FULL, input_ids=ids, stopping_criteria=[MaxLengthCriteria(194)])


@pytest.mark.parametrize("how", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["opt", "llama", "bloom"])
def test_masks_and_tokens_of_every_dtype_give_the_same_output(name: str, how: dict[str, Any]) -> None:
    model = tiny(name)
    ids, mask = ragged_prompts([3, 6, 4], 6)
    theirs = output_of(model, None, input_ids=ids, attention_mask=mask)
    for tokens, kind in ((torch.int64, torch.uint8), (torch.int32, torch.int64), (torch.int64, torch.bool)):
        given = {"input_ids": ids.to(tokens), "attention_mask": mask.to(kind), **how}
        assert torch.equal(output_of(model, SCHEDULE if how.get("lossless") else FULL, **given), theirs), (tokens, kind)


def test_numpy_numbers_are_accepted_as_schedule_fields_and_speedups() -> None:
    model = fresh("opt")
    schedule = SkipSchedule(*(np.int64(n) for n in (6, 4, 2)), horizon=np.int32(5))
    assert schedule == SCHEDULE
    assert all(type(value) in (int, str, type(None)) for value in schedule.to_dict().values())
    ids, mask = ragged_prompts([3, 6], 6)
    request = {"input_ids": ids, "attention_mask": mask}
    expected = output_of(model, SCHEDULE, **request)
    assert torch.equal(output_of(model, schedule, **request), expected)
    model.config.skipdecode = {"format": 2, "schedules": {"2": SCHEDULE.to_dict()}, "solver": {}, "task": {}}
    for speedup in (np.int64(2), np.float32(2.0), 2):
        found = output_of(model, None, **request, custom_generate=skip_generate, speedup=speedup)
        assert torch.equal(found, expected)


def test_a_speedup_is_solved_again_after_the_models_schedules_change() -> None:
    model = fresh("opt")
    ids, _ = ragged_prompts([6], 6)

    def at_twice() -> torch.Tensor:
        return output_of(model, None, input_ids=ids, custom_generate=skip_generate, speedup=2)

    outputs = []
    for schedule in (SCHEDULE, SkipSchedule(6, 3, 1, horizon=5)):
        model.config.skipdecode = {"format": 2, "schedules": {"2": schedule.to_dict()}, "solver": {}, "task": {}}
        outputs.append(at_twice())
        assert torch.equal(outputs[-1], output_of(model, schedule, input_ids=ids))
    model.config.skipdecode["schedules"]["2"]["max_layers"] = 2
    assert torch.equal(at_twice(), output_of(model, SkipSchedule(6, 2, 1, horizon=5), input_ids=ids))


@pytest.mark.parametrize("how", [{}, {"weights": "model"}, {"lossless": True}], ids=str)
@pytest.mark.parametrize("depth", [4, 8])
def test_a_trained_schedule_of_another_depth_than_the_model_is_refused(depth: int, how: dict[str, Any]) -> None:
    model = fresh("llama")
    trained = SkipSchedule(depth, 4, 2).to_dict()
    model.config.skipdecode = {"format": 2, "schedules": {"2": trained}, "solver": {}, "task": {}}
    with pytest.raises(ConfigError, match=f"the schedule is for {depth} layers, the model has 6"):
        output_of(model, None, input_ids=ragged_prompts([6], 6)[0], custom_generate=skip_generate, speedup=2, **how)


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "dynamic"}], ids=["planned", "dynamic"])
def test_autocast_gives_the_output_of_transformers(cache: dict[str, Any]) -> None:
    model = tiny("llama")
    ids, mask = ragged_prompts([3, 6], 6)
    request = {"input_ids": ids, "attention_mask": mask}
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(output_of(model, FULL, **request, **cache), output_of(model, None, **request))
    assert torch.equal(output_of(model, FULL, **request, **cache), output_of(model, None, **request))
