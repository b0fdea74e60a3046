"""Passes of an engine on a GPU: kernels read and write the pool where it is, and decode steps are CUDA graphs.

A graph replays the same kernels on the same memory. So the tokens of a step, their KV slots, where their sequences
begin and how many of them run each layer are in a buffer, which one copy fills. There is a graph for each set of layers
and each padded number of tokens. Every token is computed in every layer that one of them runs, and those that do not
run it keep their hidden states: a step of few tokens takes the time of reading the weights, which does not depend on
their number.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from skipdecode.engine.chunk_inputs import ChunkInputs
from skipdecode.engine.kv_pool import KVPool, PoolCache
from skipdecode.engine.ragged_inputs import PositionTables
from skipdecode.fastpath.gpu_layer import gpu_layers
from skipdecode.fastpath.graph_capture import GraphRecorder, Replay
from skipdecode.fastpath.layer import FastLayer
from skipdecode.fastpath.model import FastDecoder
from skipdecode.fastpath.step_inputs import StepInputs
from skipdecode.kernels import on_gpu

MAX_GRAPHS = 64  # the least recently used is dropped first


def padded(tokens: int) -> int:
    """The number of tokens of the graph that runs `tokens`: a power of 2 up to 8, then a multiple of 8.

    >>> [padded(tokens) for tokens in (1, 3, 8, 9, 40)]
    [1, 4, 8, 16, 40]
    """
    return 1 << (tokens - 1).bit_length() if tokens <= 8 else -(-tokens // 8) * 8


class SpanInputs(StepInputs):
    """The inputs of a decode step in a buffer. The kernels find the keys and values of each token's sequence by it.

    Args:
        tokens: the maximum number of tokens; those that run are the first ones.
        depth: layers of the model.
        drafts: whether a sequence may have several tokens, which attend to each other.

    Attributes:
        tokens: [tokens].
    """

    in_buffers = True
    attends = True

    def __init__(self, kernels: Any, pool: KVPool, tokens: int, depth: int, *, drafts: bool) -> None:
        super().__init__(0, None, None, None)
        self._kernels = kernels
        self._pool = pool
        self._drafts = drafts
        self._buffer = torch.zeros((2 + depth) * tokens + depth, dtype=torch.int32, device=pool.keys.device)
        by_token = self._buffer[:-depth].view(2 + depth, tokens)
        self.tokens, self._slots, self._starts = by_token[0], by_token[1], by_token[2:]
        self._counts = self._buffer[-depth:, None]  # [layers, 1]: how many of the tokens run each
        self._numbers = torch.arange(tokens, device=pool.keys.device)[:, None]
        self._layer = 0

    def fill(
        self,
        tokens: Sequence[int],
        slots: Sequence[int],
        starts: torch.Tensor,
        layers: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        """Set the step that runs next; the arguments are those of `GpuPasses.decode`."""
        depth, size = len(self._counts), len(self.tokens)
        filled = torch.zeros(len(self._buffer), dtype=torch.int32)
        by_token = filled[:-depth].view(2 + depth, size)
        by_token[:2, : len(tokens)] = torch.tensor([tokens, slots], dtype=torch.int32)
        by_token[2:, : len(tokens)] = starts.T
        filled[-depth:][list(layers)] = torch.tensor(counts, dtype=torch.int32)
        if self._buffer.device.type == "cuda":  # the copy then doesn't wait for the steps before
            filled = filled.pin_memory()
        self._buffer.copy_(filled, non_blocking=True)

    def look_up(self, tables: PositionTables) -> None:
        """Read what the tokens need of the tables, by operations that are the same for every step."""
        self.position_ids, self.rotary, self.bias = tables.at(self._slots)

    def of_layer(self, index: int) -> "SpanInputs":
        self._layer = index
        return self

    def running(self) -> torch.Tensor:
        """Whether each token runs the layer [tokens, 1]."""
        return self._numbers < self._counts[self._layer]

    def attend(
        self, layer: FastLayer, cached: Any, query: torch.Tensor, key: Any, value: Any, rotary: Any
    ) -> torch.Tensor:
        keys, values, starts, count = (
            self._pool.keys, self._pool.values, self._starts[self._layer], self._counts[self._layer]
        )  # fmt: skip
        if self._drafts:
            self._kernels.write(key, value, keys, values, self._slots, starts, count, rotary)
            key = value = None
        how: Any = {"scale": layer.scaling, "bias": self.bias, "rotary": rotary, "window": layer.window}
        attended: torch.Tensor = self._kernels.attend(
            query, key, value, keys, values, self._slots, starts=starts, count=count, **how
        )
        return attended


class _PartlyRun:
    """A layer that only the first tokens run; the others keep their hidden states."""

    def __init__(self, layer: Callable[..., torch.Tensor]) -> None:
        self._layer = layer

    def __call__(self, hidden: torch.Tensor, cached: Any, inputs: SpanInputs) -> torch.Tensor:
        return torch.where(inputs.running(), self._layer(hidden, cached, inputs), hidden)


class SpanChunkInputs(ChunkInputs):
    """`ChunkInputs` for kernels, which have no padding: blocks of adjacent tokens of one prompt attend together."""

    attends = True

    def __init__(self, kernels: Any, *inputs: Any) -> None:
        super().__init__(*inputs)
        self._kernels = kernels
        device, size = self.pool.keys.device, kernels.QUERY_BLOCK
        ends = list(accumulate(self.counts))
        blocks = [
            (first, min(size, end - first))
            for end, count in zip(ends, self.counts, strict=True)
            for first in range(end - count, end, size)
        ]
        self._token_slots = torch.tensor(self._slots, dtype=torch.int32, device=device)
        self._token_starts = self.starts.T[:, self._rows].contiguous().to(device)  # [layers, tokens]
        self._blocks = torch.tensor(blocks, dtype=torch.int32, device=device).T.contiguous()
        self._all = torch.tensor([len(self._slots)], dtype=torch.int32, device=device)
        self._layer = 0

    def of_layer(self, index: int) -> "SpanChunkInputs":
        self._layer = index
        return self

    def for_last_tokens(self) -> "SpanChunkInputs":  # type: ignore[override]
        return self

    def attend(
        self, layer: FastLayer, cached: Any, query: torch.Tensor, key: Any, value: Any, rotary: Any
    ) -> torch.Tensor:
        keys, values, slots = self.pool.keys, self.pool.values, self._token_slots
        starts, how = self._token_starts[self._layer], {"scale": layer.scaling, "bias": self.bias}
        self._kernels.write(key, value, keys, values, slots, starts, self._all, rotary)
        attended: torch.Tensor
        if len(query) == len(slots):
            attended = self._kernels.attend_in_prompts(
                query, keys, values, slots, starts, self._blocks, **how, window=layer.window
            )
        else:  # of the last tokens alone
            attended = self._kernels.attend(
                query, None, None, keys, values, slots[self.last], **how, starts=starts[self.last], count=self._all,
                window=layer.window,
            )  # fmt: skip
        return attended


class GpuPasses:
    """The passes of a model whose kernels run on the pool's device.

    Args:
        kernels: `skipdecode.kernels.gpu`.
        tables: which have grown to the positions of a pass before it runs.
    """

    def __init__(
        self, decoder: FastDecoder, pool: KVPool, cache: PoolCache, tables: PositionTables, kernels: Any
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._cache: Any = cache
        self._tables = tables
        self._kernels = kernels
        self._gpu_layers = gpu_layers(decoder.layers, decoder.dtype, pool.keys.device)
        self._recorder = GraphRecorder()
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()

    @classmethod
    def where_supported(
        cls, decoder: FastDecoder, pool: KVPool, cache: PoolCache, tables: PositionTables
    ) -> "GpuPasses | None":
        """None for a device without the kernels, and in float32, which is used to check results."""
        kernels = on_gpu.kernels_on(pool.keys.device) if decoder.dtype in on_gpu.HALF_PRECISION else None
        return cls(decoder, pool, cache, tables, kernels) if kernels is not None else None

    def chunk_inputs(self, *inputs: Any) -> SpanChunkInputs:
        """The inputs of chunks of prompts; the arguments are those of ChunkInputs."""
        return SpanChunkInputs(self._kernels, *inputs)

    def decode(
        self,
        tokens: Sequence[int],
        slots: Sequence[int],
        starts: torch.Tensor,
        layers: tuple[int, ...],
        counts: Sequence[int],
        *,
        drafts: bool,
    ) -> torch.Tensor:
        """Run a decode step. Returns logits [tokens, vocabulary].

        Args:
            tokens: those that run more layers come first, and those of one sequence ascend.
            slots: the KV slot of each in its own sequence.
            starts: where the sequence of each begins in the pool [tokens, layers of the model], int32 on CPU.
            layers: those that run, ascending.
            counts: for each of them, how many of the tokens run it.
            drafts: whether a sequence has several of the tokens.
        """
        partly, size = min(counts) < len(tokens), padded(len(tokens))
        key = (self._tables.length, layers, size, partly, drafts)
        graph = self._graphs.get(key)
        with torch.cuda.device_of(self._pool.keys):
            if graph is None:
                inputs = SpanInputs(self._kernels, self._pool, size, len(self._decoder.layers), drafts=drafts)
                graph = self._graphs[key] = _Graph(inputs, functools.partial(self._forward, inputs, layers, partly))
                if len(self._graphs) > MAX_GRAPHS:
                    self._graphs.popitem(last=False)
            self._graphs.move_to_end(key)
            fill = functools.partial(graph.inputs.fill, tokens, slots, starts, layers, counts)
            return graph.run(self._recorder, fill)[: len(tokens)].clone()

    def _forward(self, inputs: SpanInputs, layers: Sequence[int], partly: bool) -> torch.Tensor:
        inputs.look_up(self._tables)
        run: Any = self._decoder.layers
        if self._gpu_layers is not None and len(inputs.tokens) <= on_gpu.MAX_ROWS:
            run = self._gpu_layers
        if partly:
            run = [layer and _PartlyRun(layer) for layer in run]
        return self._decoder(inputs.tokens, layers, self._cache, inputs, run)


class _Graph:
    """A decode step that is captured when it runs for the second time: many steps run once."""

    def __init__(self, inputs: SpanInputs, forward: Callable[[], torch.Tensor]) -> None:
        self.inputs = inputs
        self._forward = forward
        self._runs = 0
        self._replay: Replay | None = None
        self._logits: list[torch.Tensor] = []

    def run(self, recorder: GraphRecorder, fill: Replay) -> torch.Tensor:
        """The logits of the step that `fill` sets, which the next one overwrites."""
        self._runs += 1
        if self._runs == 2:
            self._replay = recorder.record(self._compute, self.inputs.tokens.device, fill)
        fill()
        (self._replay or self._compute)()
        return self._logits[0]

    def _compute(self) -> None:
        self._logits[:] = [self._forward()]
