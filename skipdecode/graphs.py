"""Decode steps as CUDA graphs: on a GPU a step's hundreds of small kernels take longer to launch than to run.

A graph replays the same kernels on the same memory, so everything that changes from token to token is written into
buffers that stay: the tokens, their column, their positions, and which columns they may attend to. There is one graph
for each distinct budget of a schedule and each number of rows (rows whose texts have ended leave), captured when it is
first reached, all in one memory pool. Fewer rows are the first of the same buffers. Buffers and graphs are kept for the
next call of the same shape.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from skipdecode.block import StepInputs
from skipdecode.cache import PlannedCache, PlannedLayer
from skipdecode.lean import LeanDecoder
from skipdecode.schedule import SkipSchedule

# Prompts whose columns round up to the same multiple of this share buffers and graphs.
PROMPT_GRAIN = 64
# Shapes that are kept for each model, each with a cache and a few graphs; the longest unused goes first.
KEPT = 4

Replay: TypeAlias = Callable[[], None]


class StaticInputs(StepInputs):
    """Inputs in buffers that stay; the column is a value in memory, so that the same operations serve every column.

    The tokens attend to the whole cache; `bias` hides the columns that aren't written yet.
    """

    __slots__ = ("column_index",)

    def __init__(
        self,
        column_index: torch.Tensor,
        position_ids: torch.Tensor | None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        bias: torch.Tensor,
    ) -> None:
        super().__init__(0, position_ids, rotary, bias)
        self.column_index = column_index  # [1]

    def first_rows(self, count: int) -> "StaticInputs":
        """The inputs of the first rows, in the same memory."""
        assert self.bias is not None
        position_ids = None if self.position_ids is None else self.position_ids[:count]
        rotary = None if self.rotary is None else (self.rotary[0][:count], self.rotary[1][:count])
        return StaticInputs(self.column_index, position_ids, rotary, self.bias[:count])

    def update_cache(
        self, layer: PlannedLayer, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As StepInputs.update_cache, with all columns of the buffers."""
        keys: Any = layer.keys
        values: Any = layer.values
        keys.index_copy_(2, self.column_index, key[:, :, None])
        values.index_copy_(2, self.column_index, value[:, :, None])
        assert self.bias is not None
        return keys, values, self.bias[..., : keys.shape[2]]

    def places(self, tokens: int) -> None:
        """None: the column stands in a buffer."""

    def copy_from(self, inputs: StepInputs) -> None:
        """Take over the values of another step's."""
        self.column_index.fill_(inputs.column)
        if self.position_ids is not None and inputs.position_ids is not None:
            self.position_ids.copy_(inputs.position_ids)
        if self.rotary is not None and inputs.rotary is not None:
            for ours, theirs in zip(self.rotary, inputs.rotary, strict=True):
                ours.copy_(theirs)


class StepGraphs:
    """The decode steps of generations of one shape under one schedule: buffers, a graph for each budget and row count.

    Args:
        decoder: of a model without sliding windows.
        schedule: of the generations.
        steps: decode steps at most.
        prompt_columns: of the prompts, at most.

    Attributes:
        key: the shape, which a later call must share to use them again; None where none may.
    """

    def __init__(self, decoder: LeanDecoder, schedule: SkipSchedule, steps: int, prompt_columns: int) -> None:
        self.cache = PlannedCache(schedule, steps, prompt_columns=prompt_columns)
        self.key: Any = None
        self._decoder = decoder
        self._columns = prompt_columns + steps
        self._buffers: tuple[torch.Tensor, StaticInputs] | None = None  # of all rows
        self._tokens: torch.Tensor | None = None  # those of the rows that run
        self._inputs: StaticInputs | None = None
        self._graphs: dict[tuple[Sequence[int], int], tuple[Replay, list[torch.Tensor]]] = {}
        self._pool: Any = None

    def start(self, first: StepInputs, batch: int, device: torch.device) -> None:
        """Begin a generation of `batch` rows whose prompt is cached, by the inputs of its first step."""
        if self._buffers is None:
            rows = 1 if first.bias is None else first.bias.shape[0]
            heads = 1 if first.bias is None else first.bias.shape[1]
            bias = torch.empty(rows, heads, 1, self._columns, dtype=self._decoder.dtype, device=device)
            column_index = torch.zeros(1, dtype=torch.long, device=device)
            tokens = torch.zeros(batch, dtype=torch.long, device=device)
            position_ids = None if first.position_ids is None else first.position_ids.clone()
            rotary = None if first.rotary is None else (first.rotary[0].clone(), first.rotary[1].clone())
            self._buffers = (tokens, StaticInputs(column_index, position_ids, rotary, bias))
        self._tokens, self._inputs = self._buffers
        assert self._inputs.bias is not None
        self._inputs.bias.fill_(float("-inf"))
        prompt = slice(0, first.column)
        self._inputs.bias[..., prompt] = 0 if first.bias is None else first.bias[..., prompt]

    def run(self, tokens: torch.Tensor, layers: Sequence[int], inputs: StepInputs) -> torch.Tensor:
        """Logits [batch, vocabulary] of `tokens` [batch]; the next step of as many layers and rows writes over them."""
        assert self._inputs is not None  # start comes first
        assert self._tokens is not None
        assert self._inputs.bias is not None
        self._tokens.copy_(tokens)
        self._inputs.copy_from(inputs)
        column = slice(inputs.column, inputs.column + 1)
        self._inputs.bias[..., column] = 0 if inputs.bias is None else inputs.bias[..., column]
        key = (layers, len(tokens))
        if key not in self._graphs:
            self._graphs[key] = self._capture(layers)
        replay, result = self._graphs[key]
        replay()
        for layer in layers:
            self.cache.layers[layer].length = inputs.column + 1  # type: ignore[union-attr]
        return result[0]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Run `rows` alone, in their order, until the next `start`: the first rows of the buffers from now on."""
        assert self._tokens is not None
        assert self._inputs is not None
        bias = self._inputs.bias
        assert bias is not None
        self.cache.keep_rows(rows)
        if len(bias) > 1:  # one for each row
            bias[: len(rows)] = bias[list(rows)]
        self._tokens, self._inputs = self._tokens[: len(rows)], self._inputs.first_rows(len(rows))

    def _capture(self, layers: Sequence[int]) -> tuple[Replay, list[torch.Tensor]]:
        """A function that runs a step of `layers`, and the list that it leaves the logits in."""
        result: list[torch.Tensor] = []

        def forward() -> None:
            assert self._tokens is not None
            assert self._inputs is not None
            result[:] = [self._decoder(self._tokens, layers, self.cache, self._inputs)]

        assert self._tokens is not None
        if self._tokens.device.type != "cuda":
            return forward, result
        # Kernels load and libraries choose their algorithms in the first runs, which a capture can't record.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # thread_local: what another thread does meanwhile, such as allocating memory, doesn't end the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            forward()
        return graph.replay, result


# decoder -> shape -> graphs, the longest unused first
_KEPT: weakref.WeakKeyDictionary[LeanDecoder, OrderedDict[Any, StepGraphs]] = weakref.WeakKeyDictionary()


def step_graphs(
    decoder: LeanDecoder, schedule: SkipSchedule, steps: int, shape: tuple[int, int, bool], *, keep: bool
) -> StepGraphs:
    """The graphs for a generation of one shape, from an earlier call where there was one.

    They are this call's alone, so that two threads never write into the same buffers; `keep_step_graphs` lets the next
    call have them.

    Args:
        decoder, schedule, steps: as in StepGraphs.
        shape: rows, prompt columns, and whether every row fills them.
        keep: whether the next call may have the same buffers; not where the cache is handed out.
    """
    rows, columns, full = shape
    columns = -(-columns // PROMPT_GRAIN) * PROMPT_GRAIN
    if not keep:
        return StepGraphs(decoder, schedule, steps, columns)
    kept = _KEPT.setdefault(decoder, OrderedDict())
    key = (schedule, steps, rows, columns, full)
    found = kept.pop(key, None)
    if found is None:
        _forget_all_but(kept, KEPT - 1)
        found = StepGraphs(decoder, schedule, steps, columns)
        found.key = key
    found.cache.reset()
    return found


def keep_step_graphs(decoder: LeanDecoder, graphs: StepGraphs) -> None:
    """Let the next call of the same shape have them, once a generation has ended well."""
    if graphs.key is not None:
        kept = _KEPT.setdefault(decoder, OrderedDict())
        kept[graphs.key] = graphs
        _forget_all_but(kept, KEPT)


def _forget_all_but(kept: OrderedDict[Any, StepGraphs], count: int) -> None:
    while len(kept) > count:
        kept.popitem(last=False)
