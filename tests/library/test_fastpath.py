"""The fast path computes what the model's own forward pass does, for every family and kind of batch and cache."""

import gc
import weakref
from typing import Any

import pytest
import torch
from fastpath_cases import MODELS, SCHEDULES, fresh, generate, tiny
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_family, tiny_opt
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.integrations.bitnet import BitLinear
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from skipdecode import ConfigError, SkipSchedule
from skipdecode.fastpath.model import alibi_slopes
from skipdecode.generate.fast_path import fast_path
from skipdecode.kernels import int8
from skipdecode.kernels.few_bits import round_to_4_bits
from skipdecode.kernels.int8 import Int8Linear
from skipdecode.schedule.cost import CostModel


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [[3, 12, 5], [6, 6]], ids=["ragged", "even"])
@pytest.mark.parametrize("schedule", SCHEDULES[::2], ids=["skipping", "even placement"])
def test_fast_path_logits_and_tokens_equal_the_models_own(
    name: str, lengths: list[int], schedule: SkipSchedule
) -> None:
    model = tiny(name)
    assert fast_path(model).why_not() is None
    answers = {"return_dict_in_generate": True, "output_logits": True}
    fast = generate(model, lengths, schedule, **answers)
    stock = generate(model, lengths, schedule, cache_implementation="dynamic", **answers)
    assert torch.equal(fast.sequences, stock.sequences)
    for ours, theirs in zip(fast.logits, stock.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_packing_weights_other_than_float32_and_bfloat16_is_refused(dtype: torch.dtype) -> None:
    model = fresh("opt").to(dtype)
    with pytest.raises(ConfigError, match=f"'packed' needs float32 or bfloat16, and the model is in {dtype}"):
        generate(model, [3], SCHEDULES[0], weights="packed")
    for weights in ("model", "int8"):
        generate(model, [3], SCHEDULES[0], weights=weights)


def test_weights_are_packed_by_default_where_copies_fit_in_half_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_opt("opt", 6, seed=12)
    size = sum(p.numel() * 4 for p in model.parameters())
    monkeypatch.setattr("skipdecode.generate.fast_path.free_memory", lambda: 2 * size)
    assert fast_path(model).usual_weights() == "model"
    monkeypatch.setattr("skipdecode.generate.fast_path.free_memory", lambda: 2 * size + 1)
    assert fast_path(model).usual_weights() == "packed"
    fast_path(model).decoder()
    monkeypatch.setattr("skipdecode.generate.fast_path.free_memory", lambda: 0)
    assert fast_path(model).usual_weights() == "packed"  # they were made before
    assert fast_path(tiny_opt("opt", 6, seed=13).half()).usual_weights() == "model"


def test_copied_weights_are_refused_on_devices_that_have_no_kernels_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = tiny_opt.__wrapped__("opt", 2)
    for weights in ("packed", "int8"):
        with pytest.raises(ConfigError, match=f"weights='{weights}' needs a CPU with oneDNN, and the model is on meta"):
            fast_path(model).decoder(weights)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr("skipdecode.generate.fast_path.kernels_on", lambda device: None)
    for weights, words in (("packed", "a CPU with oneDNN, and"), ("int8", "the Triton kernels"), ("int4", "bfloat16")):
        with pytest.raises(ConfigError, match=f"weights='{weights}'.* needs .*{words}"):
            fast_path(model).decoder(weights)


def test_a_model_on_the_meta_device_has_no_calibrated_profile() -> None:
    with torch.device("meta"):
        model = tiny_opt.__wrapped__("opt", 2)
    assert fast_path(model).profile() is None


@pytest.mark.parametrize("name", ["gpt2", "mistral", "opt-350m", "bloom"])
def test_a_planned_cache_works_with_the_models_own_forward_pass(name: str) -> None:
    model = tiny(name)
    expected = generate(model, [3, 12, 5], SCHEDULES[0])
    handle = model.register_forward_hook(lambda *_: None)
    try:
        assert fast_path(model).why_not() == "the model has hooks"
        assert torch.equal(generate(model, [3, 12, 5], SCHEDULES[0]), expected)
    finally:
        handle.remove()
    assert fast_path(model).why_not() is None


def test_a_model_with_an_adapter_decodes_with_the_adapter() -> None:
    model = get_peft_model(fresh("opt"), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)).eval()
    reason = fast_path(model.get_base_model()).why_not()
    assert "is a Linear" in str(reason)  # peft's, not torch's
    adapted = generate(model, [5, 5], SCHEDULES[0])
    with model.disable_adapter():
        assert not torch.equal(generate(model, [5, 5], SCHEDULES[0]), adapted)
    assert torch.equal(generate(model, [5, 5], SCHEDULES[0], cache_implementation="dynamic"), adapted)


def replace_forward(attention: Any) -> None:
    """Replace its forward, and leave it with as many attributes as before."""
    attention.forward = attention.forward
    del attention.is_cross_attention


class Doubled(nn.Sequential):
    """A module of a class that is neither torch's nor transformers'."""


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda m: m.train(), "training mode"),
        (lambda m: m.transformer.h[3].attn.train(), "transformer.h.3.attn is in training mode"),
        (lambda m: setattr(m.config, "add_cross_attention", True), "add_cross_attention=True"),
        (lambda m: m.transformer.h[2].half(), "of several types"),
        (lambda m: setattr(m.config, "quantization_config", {"quant_method": "fp8"}), "weights are quantised (fp8)"),
        (lambda m: setattr(m.config, "quantization_config", BitsAndBytesConfig()), "are quantised (bitsandbytes)"),
        (lambda m: setattr(m.transformer.h[1].mlp, "c_fc", BitLinear(4, 4, False).eval()), "c_fc is a BitLinear"),
        (lambda m: nn.utils.parametrizations.weight_norm(m.lm_head), "Linear"),
        (lambda m: m.transformer.h[1].mlp.register_forward_hook(lambda *_: None), "transformer.h.1.mlp has hooks"),
        (lambda m: m.transformer.h[1].ln_2.register_forward_pre_hook(lambda *_: None), "h.1.ln_2 has hooks"),
        (lambda m: replace_forward(m.transformer.h[1].attn), "the forward of transformer.h.1.attn is replaced"),
        (lambda m: setattr(m.transformer.h[1].mlp, "_hf_hook", lambda *_: None), "transformer.h.1.mlp has hooks"),
        (lambda m: setattr(m.transformer.h[1], "ln_2", Doubled(m.transformer.h[1].ln_2).eval()), "ln_2 is a Doubled"),
    ],
)
def test_a_changed_model_has_no_fast_path_for_a_reason_that_names_the_change(spoil: Any, reason: str) -> None:
    model = tiny_family.__wrapped__("gpt2")
    assert fast_path(model).why_not() is None
    spoil(model)
    assert reason in str(fast_path(model).why_not())
    assert fast_path(model).why_not() == fast_path(model).why_not()


def test_a_model_is_freed_after_decoding_when_its_last_reference_goes() -> None:
    model = tiny_family.__wrapped__("gpt2")
    generate(model, [3, 5], SCHEDULES[0])
    hooks = [part.register_forward_hook(lambda *_, held=model: None) for part in (model, model.transformer.h[2])]
    generate(model, [3, 5], SCHEDULES[0])
    hooks.pop().remove()  # the other stays registered, and its closure holds the model
    known = weakref.ref(model)
    del model
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("name", MODELS)
def test_decoding_leaves_the_model_as_it_was_inspected(name: str) -> None:
    model = tiny(name)
    generate(model, [3, 5], SCHEDULES[0])
    look = fast_path(model).look()
    generate(model, [3, 5], SCHEDULES[0])
    assert fast_path(model).look() is look
    generate(model, [3, 5], SCHEDULES[0], cache_implementation="dynamic")  # by the model's own forward pass
    assert fast_path(model).look().same_weights_as(look)


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 16])
def test_alibi_slopes_equal_those_of_bloom(heads: int) -> None:
    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(heads, torch.device("cpu")), theirs)


def test_an_unknown_kind_of_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown weights 'int2'"):
        generate(tiny_opt("opt", 6), [3], SCHEDULES[0], weights="int2")


@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("halved", [False, True])
def test_an_int8_projection_equals_one_with_rounded_weights_and_activations(
    rows: int, dtype: torch.dtype, halved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if halved:  # as on a processor without int8 dot products
        monkeypatch.setattr(int8, "overflows", lambda: True)
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 40), torch.randn(24)
    hidden = (torch.randn(rows, 40) * torch.tensor([[1.0], [50.0], [1e-3]]).repeat(100, 1)[:rows]).to(dtype)
    hidden[-1, 3] = 0
    rounded = hidden.double()
    step = rounded.abs().amax(1, keepdim=True) / 127
    scale = weight.double().abs().amax(1, keepdim=True) / 127
    reference = ((rounded / step).round() * step) @ ((weight.double() / scale).round() * scale).T + bias
    close = 1e-4 if dtype == torch.float32 else 2e-2
    found = Int8Linear(weight, bias)(hidden)
    assert found.dtype == dtype
    # A value halfway between two steps may be rounded either way.
    torch.testing.assert_close(found.double(), reference, rtol=close, atol=close + float(step.max() * scale.max()))
    assert (found.double() - reference).abs().median() < close


def test_an_int8_projection_treats_rows_alone_and_gives_the_bias_for_a_row_of_zeros() -> None:
    torch.manual_seed(1)
    bias = torch.randn(8)
    linear = Int8Linear(torch.randn(8, 16), bias)
    hidden = torch.randn(3, 16) * torch.tensor([[1.0], [100.0], [0.0]])
    together = linear(hidden)
    assert torch.equal(together, torch.cat([linear(row[None]) for row in hidden]))
    assert torch.equal(together[2], bias)
    many = linear(hidden.repeat(40, 1))  # which go through other operations
    torch.testing.assert_close(many, together.repeat(40, 1))


@pytest.mark.parametrize("name", MODELS)
def test_int8_logits_are_close_to_the_models_own(name: str) -> None:
    model = fresh(name)  # packed copies of another instruction set may differ in a last bit, and so in a step of 8 bits
    answers = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 2}
    own = generate(model, [3, 7, 5], SCHEDULES[1], **answers).logits
    rounded = generate(model, [3, 7, 5], SCHEDULES[1], weights="int8", **answers).logits
    for step in (0, 1):  # the prompt, and a step of decoding
        assert 0 < float((own[step] - rounded[step]).norm() / own[step].norm()) < 0.1


class GPTQLinear(nn.Module):
    """As of another library: several weights in a value of a buffer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.inputs = linear.in_features
        rounded, self.scale = round_to_4_bits(linear.weight.detach())
        self.register_buffer("qweight", rounded[:, ::2] + 8 | rounded[:, 1::2] << 4)
        self.bias = linear.bias

    def restored(self) -> torch.Tensor:
        numbers = torch.stack([self.qweight & 15, (self.qweight >> 4) + 8], dim=2).flatten(1) - 8  # type: ignore[operator]
        return (numbers * self.scale.float().repeat_interleave(32, dim=1))[:, : self.inputs]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.restored(), self.bias)


def test_a_model_that_another_library_quantised_decodes_by_its_own_forward_pass_with_its_originals_schedules() -> None:
    original, quantised = (fresh("opt") for _ in range(2))
    for name, module in list(quantised.model.decoder.layers.named_modules()):
        if isinstance(module, nn.Linear):
            theirs = GPTQLinear(module).eval()
            quantised.model.decoder.layers.set_submodule(name, theirs)
            original.model.decoder.layers.get_submodule(name).weight.data = theirs.restored()
    quantised.config.quantization_config = {"quant_method": "gptq"}
    for schedule in SCHEDULES:
        ours, theirs = (generate(model, [3, 7], schedule) for model in (quantised, original))
        assert torch.equal(ours, theirs)
    assert CostModel.of(quantised) == CostModel.of(original)
    assert CostModel.of(quantised.config, torch.float32) == CostModel.of(original)
    with pytest.raises(
        ConfigError, match="weights is 'int8', which this model can't decode with: its weights are quant"
    ):
        generate(quantised, [3], SCHEDULES[0], weights="int8")


def test_int8_is_refused_where_there_is_no_fast_path() -> None:
    with pytest.raises(ConfigError, match="weights is 'int8', which this model can't decode with: a cache was given"):
        generate(tiny_opt("opt", 6), [3], SCHEDULES[0], weights="int8", cache_implementation="dynamic")
