"""After any change of a model between two calls, the second call decodes with the changed model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fastpath_cases import fresh
from peft import LoraConfig, get_peft_model
from tiny_models import TINY_FAMILIES, ragged_prompts
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, Qwen2ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from weight_updates import UPDATES

from skipdecode import SkipSchedule, skip_generate
from skipdecode.generate.fast_path import fast_path

FULL = SkipSchedule.full_depth(6)


def both(model: Any, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [batch, steps, vocabulary] of skip_generate at full depth, and those of transformers."""
    ids, mask = ragged_prompts([3, 7], 4)
    request = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    request |= {"input_ids": ids, "attention_mask": mask, "output_logits": True}
    ours = model.generate(**request, custom_generate=skip_generate, schedule=FULL, **changes)
    theirs = model.generate(**request)
    return torch.stack(ours.logits, 1), torch.stack(theirs.logits, 1)


def assert_same(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(*pair, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("weights", ["model", "packed", "int8"])
@pytest.mark.parametrize("change", UPDATES)
def test_decoding_uses_weights_that_changed_in_between(change: str, weights: Any) -> None:
    model = fresh("opt")
    prepare, update = UPDATES[change]
    prepare(model)
    before, own = both(model, weights=weights)
    update(model, None)
    after, changed = both(model, weights=weights)
    assert (changed - own).abs().max() > 1e-3  # else the test would pass without the change
    if weights == "int8":
        other = type(model)(model.config).eval()
        other.load_state_dict(model.state_dict())
        changed, _ = both(other, weights=weights)
    assert_same((after, changed))
    assert not torch.equal(before, after)


@pytest.mark.parametrize("name", sorted(TINY_FAMILIES))
def test_decoding_works_with_weights_that_are_slices_of_wider_ones(name: str) -> None:
    """Width pruning leaves such norms and embeddings, which aren't contiguous."""
    model = fresh(name)
    before, _ = both(model)
    for module in model.modules():
        for key, weight in list(module.named_parameters(recurse=False)):
            if not isinstance(module, nn.Linear):
                setattr(module, key, nn.Parameter(torch.stack([weight.detach(), weight.detach() + 1], -1)[..., 0]))
    assert not model.get_input_embeddings().weight.is_contiguous()
    after, theirs = both(model)
    assert_same((after, theirs))
    assert_same((after, before))


def test_a_change_of_a_parameter_with_the_memory_of_another_is_detected() -> None:
    model = fresh("llama")
    head: Any = model.get_output_embeddings()
    both(model, weights="packed")
    head.weight = nn.Parameter(head.weight.data)
    both(model, weights="packed")
    own = both(model)[1]
    with torch.no_grad():
        head.weight[7] *= 3  # a row without a sampled value
    ours, theirs = both(model, weights="packed")
    assert (theirs - own).abs().max() > 1e-3  # else the test would pass without the change
    assert_same((ours, theirs))


def test_an_unchanged_model_keeps_its_copies_even_with_weights_of_nan() -> None:
    model = fresh("opt")
    with torch.no_grad():
        model.get_output_embeddings().weight[5] = float("nan")
    first = fast_path(model).decoder("packed")
    assert fast_path(model).decoder("packed") is first
    assert fast_path(model).decoder("model") is fast_path(model).decoder("model")
    assert fast_path(model).decoder("packed") is first


def layer(model: Any) -> Any:
    return model.get_submodule("model.layers")[3]


def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        return (output[0] * 0.5, *output[1:]) if isinstance(output, tuple) else output * 0.5

    return run


def replace_forward(part: str) -> Callable[[Any, pytest.MonkeyPatch], None]:
    def change(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        module = layer(model).get_submodule(part)
        monkeypatch.setattr(module, "forward", scaled(module.forward), raising=False)

    return change


def replace_forward_of_class(part: str) -> Callable[[Any, pytest.MonkeyPatch], None]:
    def change(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        kind = type(layer(model).get_submodule(part))
        monkeypatch.setattr(kind, "forward", scaled(kind.forward))

    return change


def register_attention(name: str, *, mask: bool) -> Callable[[Any, pytest.MonkeyPatch], None]:
    def change(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        AttentionInterface.register(name, scaled(sdpa_attention_forward))
        if mask:
            AttentionMaskInterface.register(name, sdpa_mask)
        model.set_attn_implementation(name)

    return change


def register_known_attention(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", scaled(sdpa_attention_forward))


def hook_all_modules(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def double(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 2 if isinstance(module, type(layer(model).mlp)) else output

    handle = nn.modules.module.register_module_forward_hook(double)
    monkeypatch.setattr(model, "_handle", handle, raising=False)


def scale_attention(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in model.get_submodule("model.layers"):
        block.self_attn.scaling = 3.0


def change_activation(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer(model).mlp.act_fn = nn.ReLU()


def replace_module(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    old = layer(model).mlp.up_proj
    layer(model).mlp.up_proj = nn.Linear(old.in_features, old.out_features, bias=False).eval()


def change_window(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.config.sliding_window = 3
    for block in model.get_submodule("model.layers"):
        block.self_attn.sliding_window = 3


def compile_a_layer(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_attention(model, monkeypatch)
    layers = model.get_submodule("model.layers")
    layers[1] = torch.compile(layers[1], backend="eager")


def script_the_head(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_attention(model, monkeypatch)
    model.lm_head = torch.jit.script(model.lm_head)


COMPUTATIONS: dict[str, Any] = {
    **{f"forward of {part or 'layer'}": replace_forward(part) for part in ("", "mlp", "self_attn", "mlp.up_proj")},
    "forward of a norm": replace_forward("input_layernorm"),
    "forward of a class": replace_forward_of_class("mlp"),
    "forward of the norms' class": replace_forward_of_class("input_layernorm"),
    "registered attention": register_attention("halved", mask=False),
    "registered attention and mask": register_attention("halved and masked", mask=True),
    "known attention, registered again": register_known_attention,
    "global hook": hook_all_modules,
    "scaling": scale_attention,
    "activation": change_activation,
    "another module": replace_module,
    "window": change_window,
    "a compiled layer": compile_a_layer,
    "a scripted head": script_the_head,
}


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_decoding_uses_a_changed_computation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("mistral")
    own = both(model)[1]
    try:
        COMPUTATIONS[name](model, monkeypatch)
        ours, theirs = both(model)
    finally:
        if hasattr(model, "_handle"):
            model._handle.remove()
    assert (theirs - own).abs().max() > 1e-3  # else the test would pass without the change
    assert_same((ours, theirs))


def test_decoding_uses_layer_types_that_changed_in_place() -> None:
    config = copy.deepcopy(fresh("qwen2").config)
    config.use_sliding_window, config.sliding_window = True, 4
    config.layer_types = ["full_attention"] * 5 + ["sliding_attention"]
    model = Qwen2ForCausalLM(config).eval()
    assert_same(both(model))
    config.layer_types[2] = "sliding_attention"  # some versions of transformers read it only when the model is made
    assert_same(both(model))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_hooks_that_transformers_leaves_in_a_model_do_not_end_the_fast_path(name: str) -> None:
    model = fresh(name)
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    model(torch.ones(1, 3, dtype=torch.long), output_hidden_states=True)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2))
    adapted.generate(input_ids=torch.ones(1, 3, dtype=torch.long), max_new_tokens=2)
    assert fast_path(adapted.merge_and_unload()).why_not() is None
    assert_same(both(model))
