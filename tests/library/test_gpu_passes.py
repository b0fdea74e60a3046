"""An engine by Triton kernels decodes what torch does, on a GPU or in Triton's interpreter (make test-kernels)."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine_cases import play
from kernel_devices import GPU, HERE, IN_INTERPRETER

from skipdecode.engine import gpu_passes
from skipdecode.engine.gpu_passes import GpuPasses
from skipdecode.fastpath.cpu_steps import NativeSteps
from skipdecode.fastpath.layer import rotate
from skipdecode.kernels import on_gpu
from skipdecode.kernels.on_gpu import triton_kernels

KV_HEADS, POOL_SLOTS, DIM = 2, 400, 12


class Pool:
    """Random keys and values of several sequences, with the inputs of tokens that attend to them.

    Slots that no token may read are NaN.
    """

    def __init__(self, lengths: list[int], case: str, device: str, tokens: int) -> None:
        heads = 2 if case == "plain" else 6
        self.query = torch.randn(tokens, heads, DIM, device=device)
        # Views with strides of their own, as projections give them.
        self.key = torch.randn(tokens, 5 * KV_HEADS, DIM, device=device)[:, KV_HEADS : 2 * KV_HEADS]
        self.value = torch.randn(tokens, 3 * KV_HEADS, DIM, device=device)[:, -KV_HEADS:]
        self.keys, self.values = torch.full((2, KV_HEADS, POOL_SLOTS, DIM), torch.nan, device=device)
        # Each has room for three more tokens.
        self.begins = [7 + sum(lengths[:n]) + 3 * n for n in range(len(lengths))]
        for begin, length in zip(self.begins, lengths, strict=True):
            for part in (self.keys, self.values):
                part[:, begin : begin + length] = torch.randn(KV_HEADS, length, DIM, device=device)
        self.window = 5 if case == "window" else None
        self.bias = torch.randn(1, heads, 1, 64, device=device) if case == "bias" else None
        self.rotary = None
        if case == "rotary":  # of the first 8 of 12 dimensions
            self.rotary = (torch.randn(tokens, 1, 8, device=device), torch.randn(tokens, 1, 8, device=device))

    def expected(self, sequences: list[int], slots: list[int], *, written: bool) -> torch.Tensor:
        """Attention, token by token, after those of `sequences` have been written to the pool at `slots`."""
        query, key = self.query, self.key
        if self.rotary is not None:
            query, key = rotate(query, *self.rotary), rotate(key, *self.rotary)
        keys, values = self.keys.clone(), self.values.clone()
        if not written:
            for n, (sequence, slot) in enumerate(zip(sequences, slots, strict=True)):
                keys[:, self.begins[sequence] + slot] = key[n]
                values[:, self.begins[sequence] + slot] = self.value[n]
        rows = []
        for n, (sequence, slot) in enumerate(zip(sequences, slots, strict=True)):
            first = 0 if self.window is None else max(0, slot + 1 - self.window)
            seen = slice(self.begins[sequence] + first, self.begins[sequence] + slot + 1)
            for head in range(query.shape[1]):
                kv = head * KV_HEADS // query.shape[1]
                scores = keys[kv, seen] @ query[n, head] * 0.3
                if self.bias is not None:
                    scores = scores + self.bias[0, head, 0, first : slot + 1]
                rows.append(scores.softmax(0) @ values[kv, seen])
        self.after = keys, values
        return torch.stack(rows).view(len(sequences), -1)


@pytest.mark.parametrize("device", [HERE, GPU])
@pytest.mark.parametrize("case", ["plain", "rotary", "bias", "window"])
@pytest.mark.parametrize("drafts", [False, True], ids=["steps", "drafts"])
def test_steps_attend_to_the_spans_of_their_sequences(drafts: bool, case: str, device: str) -> None:
    kernels: Any = triton_kernels()
    torch.manual_seed(0)
    sequences, slots = ([0, 0, 0, 2], [35, 36, 37, 0]) if drafts else ([3, 0, 2, 1], [1, 37, 0, 18])
    padding = 2  # rows that don't run
    pool = Pool([35 if drafts else 37, 18, 0, 1], case, device, len(slots) + padding)
    found = SimpleNamespace(keys=pool.keys.clone(), values=pool.values.clone())
    starts, at = (
        torch.tensor(each, dtype=torch.int32, device=device)
        for each in ([pool.begins[n] for n in sequences] + [0] * padding, slots + [0] * padding)
    )
    count = torch.tensor([len(slots)], dtype=torch.int32, device=device)
    key, value = pool.key, pool.value
    if drafts:
        kernels.write(key, value, found.keys, found.values, at, starts, count, pool.rotary)
        key = value = None
    how: Any = {"scale": 0.3, "bias": pool.bias, "rotary": pool.rotary, "window": pool.window}
    attended = kernels.attend(pool.query, key, value, found.keys, found.values, at, starts=starts, count=count, **how)
    pool.query, pool.key, pool.value = (each[: len(slots)] for each in (pool.query, pool.key, pool.value))
    pool.rotary = pool.rotary and (pool.rotary[0][: len(slots)], pool.rotary[1][: len(slots)])
    expected = pool.expected(sequences, slots, written=False)
    torch.testing.assert_close(attended[: len(slots)], expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip((found.keys, found.values), pool.after, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("device", [HERE, GPU])
@pytest.mark.parametrize("case", ["plain", "bias", "window"])
def test_prompts_of_several_lengths_attend_to_their_spans(case: str, device: str) -> None:
    kernels: Any = triton_kernels()
    torch.manual_seed(0)
    chunks = [(0, 9, 48), (1, 0, 3), (2, 70, 71)]  # sequence, first slot, end: the second block is short
    sequences = [n for n, first, end in chunks for _ in range(first, end)]
    slots = [slot for _, first, end in chunks for slot in range(first, end)]
    pool = Pool([end for _, _, end in chunks], case, device, len(slots))
    if pool.bias is not None:
        pool.bias = torch.randn(1, pool.query.shape[1], 1, 71, device=device)
    blocks = torch.tensor([[0, 32, 39, 42], [32, 7, 3, 1]], dtype=torch.int32, device=device)
    starts = torch.tensor([pool.begins[n] for n in sequences], dtype=torch.int32, device=device)
    at = torch.tensor(slots, dtype=torch.int32, device=device)
    attended = kernels.attend_in_prompts(
        pool.query, pool.keys, pool.values, at, starts, blocks, scale=0.3, bias=pool.bias, window=pool.window
    )
    tolerance = 1e-5 if device == "cpu" else 5e-3  # a GPU's products of blocks are of fewer bits
    expected = pool.expected(sequences, slots, written=True)
    torch.testing.assert_close(attended, expected, atol=tolerance, rtol=tolerance)


@IN_INTERPRETER
@pytest.mark.parametrize(
    ("name", "whole_layers"),
    [("llama", True), ("bloom", False), ("mistral", False)],
)
def test_engines_of_kernels_give_each_sequence_its_tokens(
    name: str, whole_layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = triton_kernels()
    monkeypatch.setattr(on_gpu, "kernels_on", lambda device: kernels)
    monkeypatch.setattr(on_gpu, "HALF_PRECISION", (torch.float32,))  # in which tokens can be compared
    monkeypatch.setattr(NativeSteps, "takes_prompt", lambda self, inputs: False)  # a GPU has none
    monkeypatch.setattr(gpu_passes, "MAX_GRAPHS", 3)
    if not whole_layers:
        monkeypatch.setattr(gpu_passes, "gpu_layers", lambda *arguments: None)
    with patch.object(GpuPasses, "decode", autospec=True, side_effect=GpuPasses.decode) as decode:
        play(name, torch.float32, 8, seed=4)
    assert {call.kwargs["drafts"] for call in decode.call_args_list} == {False, True}
