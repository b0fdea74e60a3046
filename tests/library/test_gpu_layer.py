"""Layers as Triton kernels compute what torch does, on a GPU or in Triton's interpreter (make test-kernels)."""

import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fastpath_cases import MODELS, SCHEDULES, fresh, generate, tiny
from kernel_devices import GPU, HERE, IN_INTERPRETER
from tiny_models import tiny_opt

from skipdecode import SkipSchedule
from skipdecode.fastpath.cuda_graphs import StaticInputs
from skipdecode.fastpath.gpu_layer import GpuLayer, gpu_layers
from skipdecode.fastpath.kv_cache import PlannedLayer
from skipdecode.fastpath.model import FastDecoder
from skipdecode.kernels import gpu_device, on_gpu
from skipdecode.kernels.few_bits import FewBitLinear, round_to_4_bits
from skipdecode.kernels.int8 import round_to_8_bits
from skipdecode.kernels.linear import sizes, weight_of
from skipdecode.kernels.on_gpu import triton_kernels

# All but families with sliding windows, and with norms of queries and keys.
SUPPORTED = sorted({*MODELS} - {"mistral", "qwen3"})


def halves(name: str, device: str) -> tuple[FastDecoder, FastDecoder]:
    """Decoders of the same weights in float16, and in float32."""
    half = fresh(name).half()
    whole = copy.deepcopy(half).float()
    return FastDecoder(half.to(device)), FastDecoder(whole.to(device))


@pytest.mark.parametrize("device", [HERE, GPU])
@pytest.mark.parametrize("rows", [1, 3, 8, 17])
@pytest.mark.parametrize("name", SUPPORTED)
def test_a_layer_of_triton_kernels_equals_one_of_torchs_operations(name: str, rows: int, device: str) -> None:
    kernels = triton_kernels()
    half, whole = halves(name, device)
    tested_layers, tested_steps = ((0, 1), 3) if device == "cuda" else ((1,), 2)  # the interpreter is slow
    steps, prompt = 7, 21
    mask = torch.ones(rows, prompt, dtype=torch.long, device=device)
    mask[0, :4] = 0  # a padded row
    torch.manual_seed(rows)
    for layer in tested_layers:
        reference, tested = whole.layers[layer], half.layers[layer]
        fused = GpuLayer(tested, kernels, kernels.arrivals(torch.device(device)))
        caches = [PlannedLayer(steps, prompt) for _ in range(2)]
        keys, values = torch.randn(2, rows, tested.kv_heads, prompt, tested.head_dim, device=device).half()
        caches[0].update(keys.float(), values.float())
        caches[1].update(keys, values)
        expected_inputs, prepared = (decoder.step_inputs(mask, steps) for decoder in (whole, half))
        inputs = StaticInputs.like(prepared, prompt + steps, half, torch.zeros(rows, 1, device=device))
        inputs.copy_from(prepared)
        for step in range(tested_steps):
            hidden = torch.randn(rows, sizes(tested.sources["qkv"][0])[0], device=device).half()
            inputs.move_to(step, prompt + step)
            inputs.look_up(half.dtype, masked=False)
            expected = reference(hidden.float(), caches[0], expected_inputs(step))
            found = fused(hidden, caches[1], inputs)
            scale = float(expected.detach().abs().max())
            torch.testing.assert_close(found.float() / scale, expected / scale, atol=4e-3, rtol=0)
        for ours, theirs in ((caches[1].keys, caches[0].keys), (caches[1].values, caches[0].values)):
            written = ours[:, :, : prompt + tested_steps].float()
            torch.testing.assert_close(written, theirs[:, :, : prompt + tested_steps], atol=6e-3, rtol=6e-3)


@pytest.mark.parametrize("device", [HERE, GPU])
@pytest.mark.parametrize("rows", [2, 16, 17, 32])
@pytest.mark.parametrize(
    ("inputs", "outs", "kind"),
    [
        (1100, [200], "plain"),
        (2304, [96], "gated"),
        (2304, [96], "transposed"),  # as GPT-2's lie in memory
        (1024, [192, 48, 48], "plain"),
        (640, [6400], "plain"),
    ],
)
def test_projections_of_several_rows_equal_torchs_however_programs_share_them(
    inputs: int, outs: list[int], kind: str, rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels: Any = triton_kernels()
    if device == "cpu":  # as on a Hopper GPU, or on a part of one, where the interpreter would take a minute
        processors, outs = (8, [896]) if outs == [6400] else (132, outs)
        monkeypatch.setattr(gpu_device, "processors", lambda device: processors)
        monkeypatch.setattr(gpu_device, "shared_memory", lambda device, of: 232448)
    gated = kind == "gated"
    outs = [outs[0]] * 2 if gated else outs
    arrived = kernels.arrivals(torch.device(device))
    for turn in range(2):  # the counters of finished programs are used again
        torch.manual_seed(turn)
        x, residual = (torch.randn(rows, n, device=device).half() for n in (inputs, outs[0] if gated else sum(outs)))
        weights = [torch.randn(n, inputs, device=device).half() for n in outs]
        if kind == "transposed":
            weights = [weight.T.contiguous().T for weight in weights]
        biases = [torch.randn(n, device=device).half() for n in outs]
        how: Any = {"activation": 1, "gated": gated, "residual": residual}
        found = kernels.project(x, weights, biases, arrived=arrived, **how).float()
        each = [x.float() @ weight.float().T + bias.float() for weight, bias in zip(weights, biases, strict=True)]
        expected = each[0].relu() * each[1] if gated else torch.cat(each, dim=1).relu()
        expected += residual.float()
        torch.testing.assert_close(found / expected.abs().max(), expected / expected.abs().max(), atol=2e-3, rtol=0)
        assert not arrived.any()


def restored(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """A weight [out, in] rounded to 8 or 4 bits, in float32."""
    if bits == 8:
        rounded, scale = round_to_8_bits(weight.float())
        return rounded * scale[:, None]
    rounded, scale = round_to_4_bits(weight.float())
    return (rounded * scale.float().repeat_interleave(32, dim=1))[:, : weight.shape[1]]


@pytest.mark.parametrize("device", [HERE, GPU])
@pytest.mark.parametrize("rows", [1, 3, 17, 33])
@pytest.mark.parametrize(("inputs", "outputs", "gated"), [(1100, 70, False), (333, 40, True)])
@pytest.mark.parametrize("bits", [8, 4])
def test_projections_in_few_bits_equal_those_of_the_rounded_weights(
    bits: int, inputs: int, outputs: int, gated: bool, rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels: Any = triton_kernels()
    if device == "cpu":  # as on a Hopper GPU
        monkeypatch.setattr(gpu_device, "processors", lambda device: 132)
        monkeypatch.setattr(gpu_device, "shared_memory", lambda device, of: 232448)
    torch.manual_seed(rows)
    x, residual = (torch.randn(rows, n, device=device).half() for n in (inputs, outputs))
    weights, biases = (
        [torch.randn(*n, device=device).half() for _ in range(1 + gated)] for n in ((outputs, inputs), (outputs,))
    )
    linears = [FewBitLinear(weight, bias, bits, kernels) for weight, bias in zip(weights, biases, strict=True)]
    each = [x.float() @ restored(w, bits).T + bias.float() for w, bias in zip(weights, biases, strict=True)]
    scale = max(float(one.abs().max()) for one in each)
    for linear, one in zip(linears, each, strict=True):
        torch.testing.assert_close(linear(x).float() / scale, one / scale, atol=2e-3, rtol=0)
    if rows <= on_gpu.MAX_ROWS:
        arrived = kernels.arrivals(torch.device(device))
        how: Any = {"activation": 1, "gated": gated, "residual": residual, "arrived": arrived}
        read: Any = [[getattr(linear, name) for linear in linears] for name in ("weight", "bias", "scale")]
        found = kernels.project(x, *read[:2], scales=read[2], **how).float()
        expected = (each[0].relu() * each[1] if gated else each[0].relu()) + residual.float()
        torch.testing.assert_close(found / expected.abs().max(), expected / expected.abs().max(), atol=2e-3, rtol=0)
        assert not arrived.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [[9], [3, 12, 5], [4] * 40], ids=["a row", "padded rows", "many rows"])
def test_steps_of_triton_kernels_choose_the_tokens_of_torchs_operations(name: str, lengths: list[int]) -> None:
    model: Any = fresh(name).to("cuda", torch.float16)
    for schedule in SCHEDULES:
        check_tokens(*(scored(model, lengths, schedule, cuda_graphs=graphs) for graphs in (None, False)))


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("lengths", [[4], [2, 5]], ids=["a row", "padded rows"])
@IN_INTERPRETER
def test_interpreted_steps_choose_the_tokens_of_torchs_operations(
    name: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels: Any = triton_kernels()
    attend = Mock(wraps=kernels.attend)
    monkeypatch.setattr(kernels, "attend", attend)
    model: Any = fresh(name).half()
    schedule = SkipSchedule(len(FastDecoder(model).layers), 3, 2, horizon=2)
    expected = scored(model, lengths, schedule, cuda_graphs=False, max_new_tokens=4)
    monkeypatch.setattr(on_gpu, "kernels_on", lambda device: kernels)
    check_tokens(scored(model, lengths, schedule, cuda_graphs=True, max_new_tokens=4), expected)
    assert attend.call_count == sum(schedule.budget(step) for step in range(3))


@pytest.mark.parametrize("device", [HERE, GPU])
@pytest.mark.parametrize(
    ("name", "lengths", "weights"),
    [
        ("opt", [4], "int4"),
        ("gpt2", [2, 5], "int8"),
        ("llama", [2, 5], "int4-int8-head"),
        ("gemma", [4], "int8"),
        ("qwen3", [2, 35], "int4"),  # its layers are torch's operations, and its prompts have many tokens
    ],
)
def test_steps_in_few_bits_choose_the_tokens_of_a_model_with_the_rounded_weights(
    name: str, lengths: list[int], weights: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels: Any = triton_kernels()
    project = Mock(wraps=kernels.project)
    model: Any = fresh(name).half().to(device)
    schedule = SkipSchedule(len(FastDecoder(model).layers), 3, 2, horizon=2)
    rounded = copy.deepcopy(model)
    projections = [p for layer in FastDecoder(rounded).layers for parts in layer.sources.values() for p in parts]
    bits = 4 if weights.startswith("int4") else 8
    head = rounded.get_output_embeddings()
    head.weight = torch.nn.Parameter(restored(head.weight, 4 if weights == "int4" else 8).half())  # no longer tied
    with torch.no_grad():
        for projection in projections:
            weight_of(projection).copy_(restored(weight_of(projection), bits))
    expected = scored(rounded, lengths, schedule, cuda_graphs=False, max_new_tokens=4)
    if device == "cpu":
        monkeypatch.setattr(on_gpu, "kernels_on", lambda device: kernels)
    monkeypatch.setattr(kernels, "project", project)
    check_tokens(scored(model, lengths, schedule, weights=weights, cuda_graphs=True, max_new_tokens=4), expected)
    assert project.call_count > 4 * sum(schedule.budget(step) for step in range(3))


def scored(model: Any, lengths: list[int], schedule: SkipSchedule, **changes: Any) -> Any:
    return generate(model, lengths, schedule, output_logits=True, return_dict_in_generate=True, **changes)


def check_tokens(ours: Any, theirs: Any) -> None:
    """Nearly equal logits may be ordered either way, and sequences differ from there; all others must be equal."""
    same = ours.sequences == theirs.sequences
    for step, (logits, expected) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        alike = same[:, : same.shape[1] - len(ours.logits) + step].all(dim=1)
        difference = (logits - expected)[alike].abs().max() if bool(alike.any()) else 0
        assert difference <= 0.05 * float(expected.abs().max()), step
    assert same[:, : -len(ours.logits) + 1].all()


def test_float32_and_unsupported_layers_have_no_gpu_kernels() -> None:
    layers = FastDecoder(tiny_opt("opt", 6)).layers
    for device in ("cpu", "cuda"):
        assert gpu_layers(layers, torch.float32, torch.device(device)) is None
    assert gpu_layers(layers, torch.bfloat16, torch.device("cpu")) is None
    for name in ("mistral", "qwen3"):
        model = copy.deepcopy(tiny(name)).to(torch.bfloat16)
        assert gpu_layers(FastDecoder(model).layers, torch.bfloat16, torch.device("cuda")) is None
