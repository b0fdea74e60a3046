"""skip_layers changes which layers run and nothing else, whatever wraps the model."""

import contextlib
import copy
import pickle
import re
import threading
from typing import Any

import pytest
import torch
from fastpath_cases import tiny
from naive_opt import naive_logits
from peft import LoraConfig, get_peft_model
from tiny_models import TINY_FAMILIES, VOCABULARY, ragged_prompts, tiny_opt
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.models.opt.modeling_opt import OPTDecoderLayer

from skipdecode import ConfigError, SkipSchedule, skip_generate, skip_layers
from skipdecode.families import FAMILIES, decoder_layers

SCHEDULE = SkipSchedule(6, 4, 2, horizon=5)
STOPPED = SkipSchedule(6, 4, 2, horizon=5, prompt_stop=2)


def test_every_family_in_the_table_is_tested() -> None:
    assert set(TINY_FAMILIES) | {"opt"} == set(FAMILIES)


def prompts_and_completions() -> tuple[torch.Tensor, torch.Tensor]:
    prompt, mask = ragged_prompts([4, 6], 0)
    completion, _ = ragged_prompts([8, 8], 1)
    return torch.cat([prompt, completion], 1), torch.cat([mask, torch.ones_like(completion)], 1)


def test_after_the_context_the_model_is_unchanged_even_after_an_error() -> None:
    model = tiny_opt("opt", 6)
    ids, mask = prompts_and_completions()
    keys = list(model.state_dict())
    before = model(ids, attention_mask=mask).logits
    with skip_layers(model, SCHEDULE, prompt_columns=6):
        assert list(model.state_dict()) == keys
        assert not torch.allclose(model(ids, attention_mask=mask).logits, before)
    assert torch.equal(model(ids, attention_mask=mask).logits, before)
    with pytest.raises(ZeroDivisionError), skip_layers(model, SCHEDULE, prompt_columns=6):
        _ = 1 / 0
    assert torch.equal(model(ids, attention_mask=mask).logits, before)
    assert {type(layer) for layer in decoder_layers(model)} == {OPTDecoderLayer}


def test_a_forward_method_replaced_by_other_code_still_runs_on_the_prefix() -> None:
    model = tiny_opt("opt", 6)
    layer = decoder_layers(model)[2]
    original, calls = layer.forward, []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0].shape[1])
        return original(*args, **kwargs)

    layer.forward = theirs
    try:
        ids, mask = prompts_and_completions()
        with skip_layers(model, SCHEDULE, prompt_columns=6), torch.no_grad():
            model(ids, attention_mask=mask)
            assert layer(torch.randn(2, 6, 32)).shape == (2, 6, 32)  # the prompt alone
        assert calls == [SCHEDULE.position_cutoffs(6, 14)[2], 6]
        assert layer.forward is theirs
    finally:
        del layer.forward


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("schedule", [SCHEDULE, STOPPED], ids=["", "prompt_stop"])
def test_gradient_checkpointing_leaves_the_gradients_unchanged(schedule: SkipSchedule, attention: str) -> None:
    ids, mask = prompts_and_completions()

    def gradients(checkpointing: bool) -> list[torch.Tensor]:
        model = AutoModelForCausalLM.from_config(tiny_opt("opt", 6).config, attn_implementation=attention)
        model.load_state_dict(tiny_opt("opt", 6).state_dict())
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with skip_layers(model, schedule, prompt_columns=6) as gate:
            loss = model(ids, attention_mask=mask, use_cache=False).logits.logsumexp(-1).mean()
        loss.backward()  # checkpointing runs the layers again here, outside of the context
        assert gate.layer_positions == sum(schedule.position_cutoffs(6, 14))
        return [p.grad for p in model.parameters() if p.grad is not None]

    for with_it, without in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(with_it, without)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_keep_in_graph_gives_layers_without_positions_zero_gradients_and_changes_no_others(
    model_type: str, checkpointing: bool
) -> None:
    schedule = SkipSchedule(6, 3, 2, horizon=5, prompt="max")  # layers 1 to 3 run no position
    ids, mask = prompts_and_completions()

    def gradients(keep_in_graph: bool) -> tuple[int, dict[str, torch.Tensor | None]]:
        model = copy.deepcopy(tiny(model_type)).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # else one more layer changes the random numbers of the others
        with skip_layers(model, schedule, prompt_columns=6, keep_in_graph=keep_in_graph) as gate:
            loss = model(ids, attention_mask=mask, use_cache=False).logits.logsumexp(-1).mean()
        loss.backward()
        return gate.layer_positions, {name: p.grad for name, p in model.named_parameters()}

    (kept_positions, kept), (positions, plain) = gradients(True), gradients(False)
    assert kept_positions == positions == sum(schedule.position_cutoffs(6, 14))
    bypassed = {name for name, gradient in plain.items() if gradient is None}
    assert {name for name in plain if re.search(r"layers\.[123]\.|h\.[123]\.", name)} == bypassed
    for name, gradient in kept.items():
        expected = plain[name]
        if expected is None:
            assert gradient is not None, name
            assert not gradient.any(), name
        else:
            torch.testing.assert_close(gradient, expected)


def test_keep_in_graph_runs_no_layer_more_without_gradients() -> None:
    model = tiny_opt.__wrapped__("opt", 6)
    ids, mask = prompts_and_completions()
    ran: list[int] = []
    for index, layer in enumerate(decoder_layers(model)):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    with torch.no_grad(), skip_layers(model, SkipSchedule(6, 2, 2, prompt="max"), prompt_columns=6, keep_in_graph=True):
        model(ids, attention_mask=mask)
    assert ran == [0, 5]


def test_a_peft_wrapped_model_follows_the_schedule_and_trains_its_adapters() -> None:
    plain = copy.deepcopy(tiny_opt("opt", 6))
    ids, mask = prompts_and_completions()
    expected = naive_logits(plain, ids, mask, 6, SCHEDULE).detach()
    wrapped = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=True))
    keys = list(wrapped.state_dict())
    with skip_layers(wrapped, SCHEDULE, prompt_columns=6):
        logits = wrapped(input_ids=ids, attention_mask=mask).logits
        assert list(wrapped.state_dict()) == keys
    torch.testing.assert_close(logits * mask[..., None], expected * mask[..., None], atol=1e-4, rtol=1e-4)
    logits.logsumexp(-1).mean().backward()
    assert all(p.grad is not None for name, p in wrapped.named_parameters() if "lora_B" in name)


def test_in_training_mode_positions_beyond_the_cutoff_pass_a_layer_unchanged() -> None:
    model = copy.deepcopy(tiny_opt("opt", 6)).train()
    hidden = torch.randn(2, 14, 32)
    schedule = SkipSchedule(6, 2, 2, horizon=1)  # layer 1 runs on the prompt only
    with skip_layers(model, schedule, prompt_columns=6):
        output = decoder_layers(model)[1](hidden)
    assert torch.equal(hidden[:, 6:], output[:, 6:])
    assert not torch.allclose(hidden[:, :6], output[:, :6])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": SkipSchedule(24, 8, 4)}, "the schedule is for 24 layers, the model has 6"),
        ({"schedule": "3x"}, "schedule is a str"),
        ({"prompt_columns": 0}, "prompt_columns is 0"),
        ({"prompt_columns": 15}, "must lie between 1 and the number of positions .14."),
        ({"model": torch.nn.Linear(2, 2)}, "Linear is not a transformers model"),
    ],
)
def test_invalid_arguments_of_skip_layers_are_refused_with_a_reason(change: dict[str, Any], message: str) -> None:
    request = {"model": tiny_opt("opt", 6), "schedule": SCHEDULE, "prompt_columns": 6, **change}
    ids, mask = prompts_and_completions()
    with pytest.raises(ConfigError, match=message), skip_layers(**request):
        request["model"](ids, attention_mask=mask)


@pytest.mark.parametrize("stop", [1, 2])
def test_layers_above_prompt_stop_compute_keys_and_values_from_the_hidden_state_at_the_stop(stop: int) -> None:
    model = tiny_opt("opt", 6, seed=3)
    ids, prompt = torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0)), 7
    with skip_layers(model, SkipSchedule(6, 6, 6, prompt_stop=stop), prompt_columns=prompt):
        logits = model(ids).logits[:, prompt - 1 :]
    # The reference is transformers' own cache, with the upper layers' keys and values of the prompt computed by hand.
    cache = DynamicCache(config=model.config)
    state = model(ids[:, : prompt - 1], past_key_values=cache, output_hidden_states=True).hidden_states[stop]
    for layer, held in list(zip(model.model.decoder.layers, cache.layers, strict=True))[stop:]:
        normed, attention = layer.self_attn_layer_norm(state), layer.self_attn
        for name in ("keys", "values"):
            written = getattr(attention, f"{name[0]}_proj")(normed)
            getattr(held, name).copy_(written.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2))
    expected = model(ids[:, prompt - 1 :], past_key_values=cache).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits, model(ids).logits[:, prompt - 1 :], atol=1e-2)


def test_attaching_a_second_schedule_is_refused() -> None:
    model = tiny_opt("opt", 6)
    with (
        skip_layers(model, SCHEDULE, prompt_columns=6),
        pytest.raises(ConfigError, match="already"),
        skip_layers(model, SCHEDULE, prompt_columns=6),
    ):
        pass


def test_an_unknown_family_is_refused() -> None:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "num_layers": 2, "ffn_dim": 16, "attention_heads": 2}
    with pytest.raises(ConfigError, match="model_type 'xglm' is not known"):
        decoder_layers(AutoModelForCausalLM.from_config(AutoConfig.for_model("xglm", **sizes)))


def test_skip_layers_refuses_a_cache_that_contains_tokens() -> None:
    model = tiny_opt("opt", 6)
    ids, mask = prompts_and_completions()
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    twice = torch.cat([mask, mask], 1)
    with pytest.raises(ConfigError, match="past_key_values"), skip_layers(model, SCHEDULE, prompt_columns=6):
        model(ids, attention_mask=twice, past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
@pytest.mark.parametrize("prompt", ["full", "max"])
def test_requests_for_hidden_states_and_attentions_are_refused_under_a_schedule_that_skips(
    model_type: str, prompt: Any
) -> None:
    model = tiny(model_type)
    ids, mask = prompts_and_completions()
    with skip_layers(model, SkipSchedule(6, 4, 2, horizon=5, prompt=prompt), prompt_columns=6), torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        for name in ("output_attentions", "output_hidden_states"):
            if (model_type, name) == ("bloom", "output_hidden_states"):
                states = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
                assert {state.shape for state in states} == {(2, 14, 32)}  # BLOOM collects them in its own loop
                assert len(states) == 7
                continue
            with pytest.raises(ConfigError, match=f"{name} can.t be combined with a schedule that skips layers"):
                model(ids, attention_mask=mask, **{name: True})
        assert torch.equal(model(ids, attention_mask=mask).logits, expected)
    with skip_layers(model, SkipSchedule.full_depth(6), prompt_columns=6), torch.no_grad():
        whole = model(ids, attention_mask=mask, output_hidden_states=True, output_attentions=True)
        own = whole.hidden_states, whole.attentions
    whole = model(ids, attention_mask=mask, output_hidden_states=True, output_attentions=True)
    for ours, theirs in zip(own, (whole.hidden_states, whole.attentions), strict=True):
        for mine, expected in zip(ours, theirs, strict=True):
            assert torch.equal(mine, expected)


def test_copies_and_pickles_of_an_attached_model_are_not_attached() -> None:
    model = tiny_opt.__wrapped__("opt", 6)
    ids, mask = prompts_and_completions()
    expected = model(ids, attention_mask=mask).logits
    with skip_layers(model, SCHEDULE, prompt_columns=6):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert not torch.equal(model(ids, attention_mask=mask).logits, expected)
        for made in copies:
            assert torch.equal(made(ids, attention_mask=mask).logits, expected)
    copies += [copy.deepcopy(model)]
    for made in copies:
        assert {type(layer) for layer in decoder_layers(made)} == {OPTDecoderLayer}
        assert torch.equal(made(ids, attention_mask=mask).logits, expected)
        with skip_layers(made, SCHEDULE, prompt_columns=6), skip_layers(model, SCHEDULE, prompt_columns=6):
            assert torch.equal(made(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)


def test_data_parallel_replicas_are_refused() -> None:
    model = tiny_opt("opt", 6)
    with skip_layers(model, SCHEDULE, prompt_columns=6):
        replica = decoder_layers(model)[2]._replicate_for_data_parallel()
        with pytest.raises(ConfigError, match="DataParallel"):
            replica(torch.randn(2, 14, 32))


def test_a_schedule_applies_only_to_the_thread_that_attached_it() -> None:
    model = tiny_opt("opt", 6)
    ids, mask = prompts_and_completions()
    other = SkipSchedule(6, 2, 1, horizon=3)
    expected = [model(ids, attention_mask=mask).logits.detach()]
    for schedule in (SCHEDULE, other):
        with skip_layers(model, schedule, prompt_columns=6):
            expected.append(model(ids, attention_mask=mask).logits.detach())
    for _ in range(20):
        inside, outside = threading.Barrier(3), threading.Barrier(3)
        found: dict[int, list[torch.Tensor]] = {}

        def work(n: int, inside: Any = inside, outside: Any = outside, found: Any = found) -> None:
            with skip_layers(model, (SCHEDULE, other)[n - 1], prompt_columns=6) if n else contextlib.nullcontext():
                inside.wait()
                found[n] = [model(ids, attention_mask=mask).logits.detach() for _ in range(3)]
                outside.wait()

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for n in range(3):
            assert all(torch.equal(logits, expected[n]) for logits in found[n])
    assert {type(layer) for layer in decoder_layers(model)} == {OPTDecoderLayer}


def test_a_stopping_criterion_can_generate_with_the_same_model() -> None:
    model = tiny_opt("opt", 6)
    ids, mask = prompts_and_completions()
    request = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    request |= {"custom_generate": skip_generate, "cuda_graphs": True}
    expected = model.generate(**request, schedule=SCHEDULE)
    inner: list[torch.Tensor] = []

    class DecodesItself(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            inner.append(model.generate(**request, schedule=SCHEDULE))
            return torch.zeros(len(input_ids), dtype=torch.bool)

    output = model.generate(**request, schedule=SCHEDULE, stopping_criteria=StoppingCriteriaList([DecodesItself()]))
    assert torch.equal(output, expected)
    assert all(torch.equal(found, expected) for found in inner)
