"""Decode steps as CUDA graphs: on a GPU a step's hundreds of small kernels take longer to launch than to run.

A graph replays the same kernels on the same memory, so everything that changes from token to token is written into
buffers that stay: the tokens, their column, their places, and which columns they may attend to. There is one graph for
each distinct budget of a schedule, captured when it is first reached, all in one memory pool. Buffers and graphs are
kept for the next call of the same shape.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from skipdecode.block import Step
from skipdecode.cache import PlannedCache, PlannedLayer
from skipdecode.lean import LeanDecoder
from skipdecode.schedule import SkipSchedule

# Prompts whose columns round up to the same multiple of this share buffers and graphs.
PROMPT_GRAIN = 64
# Shapes that are kept for each model, each with a cache and a few graphs; the longest unused goes first.
KEPT = 4

Replay: TypeAlias = Callable[[], None]


class StaticStep(Step):
    """A step whose column is a value in memory, so that the same operations serve every column.

    It attends to whole buffers; `bias` hides the columns that aren't written yet.
    """

    __slots__ = ("column",)

    def __init__(self, column: torch.Tensor, like: Step, bias: torch.Tensor) -> None:
        copied = None if like.rotary is None else (like.rotary[0].clone(), like.rotary[1].clone())
        super().__init__(0, None if like.places is None else like.places.clone(), copied, bias)
        self.column = column  # [1]

    def append(
        self, layer: PlannedLayer, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As Step.append, with all columns of the buffers."""
        keys: Any = layer.keys
        values: Any = layer.values
        keys.index_copy_(2, self.column, key[:, :, None])
        values.index_copy_(2, self.column, value[:, :, None])
        assert self.bias is not None
        return keys, values, self.bias[..., : keys.shape[2]]

    def move_to(self, step: Step) -> None:
        """Take over what another step says."""
        self.column.fill_(step.at)
        if self.places is not None and step.places is not None:
            self.places.copy_(step.places)
        if self.rotary is not None and step.rotary is not None:
            for ours, theirs in zip(self.rotary, step.rotary, strict=True):
                ours.copy_(theirs)


class StaticSteps:
    """All decode steps of generations of one shape under one schedule.

    Args:
        decoder: of a model without sliding windows.
        schedule: what will be decoded.
        steps: decode steps at most.
        prompt_columns: of the prompts, at most.

    Attributes:
        key: what a later call has to have in common with the first to use them again; None where none may.
    """

    def __init__(self, decoder: LeanDecoder, schedule: SkipSchedule, steps: int, prompt_columns: int) -> None:
        self.cache = PlannedCache(schedule, steps, prompt_columns=prompt_columns)
        self.key: Any = None
        self._decoder = decoder
        self._columns = prompt_columns + steps
        self._tokens: torch.Tensor | None = None
        self._step: StaticStep | None = None
        self._graphs: dict[Sequence[int], tuple[Replay, list[torch.Tensor]]] = {}
        self._pool: Any = None

    def start(self, first: Step, tokens: torch.Tensor) -> None:
        """Begin a generation of as many rows as `tokens`, whose prompt is cached and whose first step is `first`."""
        if self._step is None:
            rows = 1 if first.bias is None else first.bias.shape[0]
            heads = 1 if first.bias is None else first.bias.shape[1]
            bias = torch.empty(rows, heads, 1, self._columns, dtype=self._decoder.dtype, device=tokens.device)
            self._step = StaticStep(torch.zeros(1, dtype=torch.long, device=tokens.device), first, bias)
            self._tokens = torch.zeros_like(tokens)
        assert self._step.bias is not None
        self._step.bias.fill_(float("-inf"))
        prompt = slice(0, first.at)
        self._step.bias[..., prompt] = 0 if first.bias is None else first.bias[..., prompt]

    def run(self, tokens: torch.Tensor, layers: Sequence[int], step: Step) -> torch.Tensor:
        """Logits [batch, vocabulary] of `tokens` [batch]; they are overwritten by the next step of as many layers."""
        assert self._step is not None  # start comes first
        assert self._tokens is not None
        assert self._step.bias is not None
        self._tokens.copy_(tokens)
        self._step.move_to(step)
        at = slice(step.at, step.at + 1)
        self._step.bias[..., at] = 0 if step.bias is None else step.bias[..., at]
        if layers not in self._graphs:
            self._graphs[layers] = self._capture(layers)
        replay, result = self._graphs[layers]
        replay()
        for layer in layers:
            self.cache.layers[layer].length = step.at + 1  # type: ignore[union-attr]
        return result[0]

    def _capture(self, layers: Sequence[int]) -> tuple[Replay, list[torch.Tensor]]:
        """A function that runs a step of `layers`, and the list that it leaves the logits in."""
        result: list[torch.Tensor] = []

        def forward() -> None:
            assert self._tokens is not None
            assert self._step is not None
            result[:] = [self._decoder(self._tokens, layers, self.cache, self._step)]

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


# decoder -> shape -> steps, the longest unused first
_KEPT: weakref.WeakKeyDictionary[LeanDecoder, OrderedDict[Any, StaticSteps]] = weakref.WeakKeyDictionary()


def static_steps(
    decoder: LeanDecoder, schedule: SkipSchedule, steps: int, shape: tuple[int, int, bool], *, keep: bool
) -> StaticSteps:
    """Steps for a generation of one shape, from an earlier call where there was one.

    They are this call's alone, so that two threads never write into the same buffers; `keep_static_steps` lets the next
    call have them.

    Args:
        decoder, schedule, steps: as in StaticSteps.
        shape: rows, prompt columns, and whether every row fills them.
        keep: whether the next call may have the same buffers; not where the cache is handed out.
    """
    rows, columns, full = shape
    columns = -(-columns // PROMPT_GRAIN) * PROMPT_GRAIN
    if not keep:
        return StaticSteps(decoder, schedule, steps, columns)
    kept = _KEPT.setdefault(decoder, OrderedDict())
    key = (schedule, steps, rows, columns, full)
    found = kept.pop(key, None)
    if found is None:
        _forget_all_but(kept, KEPT - 1)
        found = StaticSteps(decoder, schedule, steps, columns)
        found.key = key
    found.cache.reset()
    return found


def keep_static_steps(decoder: LeanDecoder, steps: StaticSteps) -> None:
    """Let the next call of the same shape have them, once a generation has ended well."""
    if steps.key is not None:
        kept = _KEPT.setdefault(decoder, OrderedDict())
        kept[steps.key] = steps
        _forget_all_but(kept, KEPT)


def _forget_all_but(kept: OrderedDict[Any, StaticSteps], count: int) -> None:
    while len(kept) > count:
        kept.popitem(last=False)
