"""Decode steps as CUDA graphs: on a GPU a step's hundreds of small kernels take longer to launch than to run.

A graph replays the same kernels on the same memory. So the tokens, the number of their step and their KV slot are in
buffers that stay, with the positions of all steps, and the graph itself looks up what its step needs. There is a graph
for each budget of a schedule, each number of rows (rows of ended sequences leave), and for steps with and without the
choice of the next token. A graph is captured when its step first runs, and all share a memory pool. Fewer rows use the
first rows of the same buffers. Buffers and graphs are kept for the next call of the same shape.
"""

import functools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from skipdecode.fastpath.gpu_layer import GpuLayer, gpu_layers
from skipdecode.fastpath.graph_capture import GraphRecorder, Replay
from skipdecode.fastpath.kv_cache import PlannedCache, PlannedLayer
from skipdecode.fastpath.layer import FastLayer
from skipdecode.fastpath.model import FastDecoder
from skipdecode.fastpath.prompt_graphs import PROMPT_GRAIN, PromptGraph
from skipdecode.fastpath.row_compaction import rows_to_keep
from skipdecode.fastpath.step_inputs import PreparedInputs, StepInputs, attention_mask
from skipdecode.kernels.on_gpu import MAX_ROWS, triton_kernels
from skipdecode.schedule.schedule import SkipSchedule

# The maximum number of shapes that are kept for each model, each with a cache and a few graphs, and the maximum share
# of a GPU's memory in these caches. The least recently used is dropped first. A calibration uses dozens in turn.
MAX_KEPT, MAX_KEPT_MEMORY = 128, 0.25
MAX_AHEAD = 16  # tokens that are chosen in one call, by which Ctrl-C is delayed
# Settings of torch that say how matrix products are computed.
PRODUCTS = (
    "fp32_precision",
    "allow_fp16_accumulation",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)
STEPS_IN_FLIGHT = 2  # steps that a GPU runs before the host sees an earlier one's tokens; wasted at the end


class StaticInputs(StepInputs):
    """Inputs in buffers that a graph reads again and again: the step and its slot are values in memory.

    The tokens attend to the whole cache, and a mask hides the slots that aren't written yet. Layers with kernels of
    their own read the slot themselves.

    Args:
        tables: the inputs of all steps, its bias as wide as the cache.
        step_at: the number of the step [1].
        slot_at: the KV slot of its tokens [1].
        slots: the numbers of the cache's slots [1, 1, 1, slots].
        gpu_layers: the model's layers as kernels of their own; None where these don't run it.
    """

    in_buffers = True

    def __init__(
        self,
        tables: PreparedInputs,
        step_at: torch.Tensor,
        slot_at: torch.Tensor,
        slots: torch.Tensor,
        gpu_layers: Sequence[GpuLayer] | None,
    ) -> None:
        super().__init__(0, None, None, None)
        self.tables = tables
        self.step_at = step_at
        self.slot_at = slot_at
        self.slots = slots
        self.gpu_layers = gpu_layers

    @classmethod
    def like(cls, prepared: PreparedInputs, slots: int, decoder: FastDecoder, logits: torch.Tensor) -> "StaticInputs":
        """Buffers for generations of one shape, by the inputs of one and its prompt's logits [batch, vocabulary]."""
        bias, rotary, device = prepared.bias, prepared.rotary, logits.device
        if rotary is not None:  # sequences of another generation may have different positions
            rotary = (rotary[0].expand(len(logits), -1, -1, -1), rotary[1].expand(len(logits), -1, -1, -1))
        tables = PreparedInputs(
            0,
            None if prepared.position_ids is None else prepared.position_ids.clone(),
            None if rotary is None else (rotary[0].clone(), rotary[1].clone()),
            None if bias is None else bias.new_zeros(*bias.shape[:3], slots),
        )
        step_at, slot_at = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
        layers = gpu_layers(decoder.layers, decoder.dtype, device)
        return cls(tables, step_at, slot_at, torch.arange(slots, device=device)[None, None, None], layers)

    def first_rows(self, count: int) -> "StaticInputs":
        """The inputs of the first rows, in the same memory."""
        tables = self.tables
        fewer = PreparedInputs(
            0,
            None if tables.position_ids is None else tables.position_ids[:, :count],
            None if tables.rotary is None else (tables.rotary[0][:count], tables.rotary[1][:count]),
            None if tables.bias is None else tables.bias[:count],
        )
        return StaticInputs(fewer, self.step_at, self.slot_at, self.slots, self.gpu_layers)

    def copy_from(self, prepared: PreparedInputs) -> None:
        """Copy the inputs of another generation into the buffers, or of the rows that are left of one."""
        tables = self.tables
        if tables.position_ids is not None and prepared.position_ids is not None:
            tables.position_ids.copy_(prepared.position_ids)
        if tables.rotary is not None and prepared.rotary is not None:
            for ours, theirs in zip(tables.rotary, prepared.rotary, strict=True):
                ours.copy_(theirs)
        if tables.bias is not None and prepared.bias is not None:
            tables.bias[..., : prepared.bias.shape[-1]] = prepared.bias

    def move_to(self, step: int, slot: int) -> None:
        """Set the step that runs next, and the slot of its tokens."""
        self.step_at.fill_(step)
        self.slot_at.fill_(slot)

    def advance(self) -> None:
        """Move on to the next step."""
        self.step_at.add_(1)
        self.slot_at.add_(1)

    def layers_for(self, rows: int) -> Sequence[GpuLayer] | None:
        """The layers as kernels of their own; None where these don't run so many rows."""
        return self.gpu_layers if rows <= MAX_ROWS else None

    def look_up(self, dtype: torch.dtype, *, masked: bool) -> None:
        """Read what the current step needs from the tables, by operations that are the same for every step, for
        attention scores of this dtype; slots that aren't written yet are hidden if `masked`.
        """
        tables = self.tables
        if tables.position_ids is not None:
            self.position_ids = tables.position_ids.index_select(0, self.step_at)[0]
        if tables.rotary is not None:
            cos, sin = (part.index_select(1, self.step_at)[:, 0] for part in tables.rotary)
            self.rotary = (cos, sin)
        self.bias = tables.bias
        if masked:
            self.bias = attention_mask(self.slot_at - self.slots, None, tables.bias, dtype)

    def store(
        self, cached: PlannedLayer, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As StepInputs.store; returns the whole buffers. Models with sliding windows have no graphs."""
        keys: Any = cached.keys
        values: Any = cached.values
        keys.index_copy_(2, self.slot_at, key[:, :, None])
        values.index_copy_(2, self.slot_at, value[:, :, None])
        return keys, values

    def attend(
        self, layer: FastLayer, cached: PlannedLayer, query: torch.Tensor, key: Any, value: Any, rotary: Any
    ) -> torch.Tensor:
        keys: Any = cached.keys
        values: Any = cached.values
        kernels: Any = triton_kernels()
        how: Any = {"scale": layer.scaling, "bias": self.bias, "rotary": rotary}
        attended: torch.Tensor = kernels.attend(query, key, value, keys, values, self.slot_at, **how)
        return attended

    def mask(self, query: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
        assert self.bias is not None
        return self.bias[..., : keys.shape[2]]


class StepGraphs:
    """The decode steps of generations of one shape under one schedule: buffers, a graph for each budget and row count.

    Args:
        decoder: of a model without sliding windows.
        steps: the maximum number of decode steps.
        prompt_columns: the maximum padded length of prompts, in tokens.

    Attributes:
        key: the shape, which a later call must have to use these graphs again; None where none may.
        decoder: of the model; None while the decoder keeps these graphs, so that there is no reference cycle.
        free: an event that a GPU reaches when the last call that used these graphs has ended there.
    """

    def __init__(self, decoder: FastDecoder, schedule: SkipSchedule, steps: int, prompt_columns: int) -> None:
        self.cache = PlannedCache(schedule, steps, prompt_columns=prompt_columns)
        self.key: Any = None
        self.decoder: FastDecoder | None = decoder
        self.free: torch.cuda.Event | None = None
        self._steps = steps
        self._slots = prompt_columns + max(1, steps)  # inputs are prepared for one step at least
        self._prompt = 0  # the padded length of the current prompt
        self._buffers: tuple[torch.Tensor, torch.Tensor, StaticInputs] | None = None  # of all rows
        self._tokens: Any = None  # of the rows that run
        self._chosen: Any = None  # the tokens that each step chose [steps, rows]
        self._inputs: Any = None
        self._seen: Any = None  # their copy on the host
        self._graphs: dict[tuple[Sequence[int], int, bool], tuple[Replay, list[torch.Tensor]]] = {}
        self._recorder = GraphRecorder()
        self._prompt_graph = PromptGraph(self.cache, schedule.prompt_layers, schedule.prompt_stop)

    def prefill(self, tokens: torch.Tensor, mask: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        """Run prompts by a graph of their own; all arguments [batch, a multiple of PROMPT_GRAIN].

        Returns logits of the last tokens [batch, vocabulary].
        """
        assert self.decoder is not None
        with torch.cuda.device_of(tokens):
            inputs = self.decoder.prompt_inputs(mask, position_ids, keep_padding=True)
            return self._prompt_graph.run(self.decoder, tokens, inputs, self._recorder)

    def start(self, prepared: PreparedInputs, logits: torch.Tensor) -> None:
        """Start a generation whose prompt is in the cache and gave these last logits [batch, vocabulary]."""
        if self._buffers is None:
            batch, device = len(logits), logits.device
            tokens = torch.zeros(batch, dtype=torch.long, device=device)
            chosen = torch.zeros(max(1, self._steps), batch, dtype=torch.long, device=device)
            self._seen = torch.zeros(MAX_AHEAD, batch, dtype=torch.long, pin_memory=device.type == "cuda")
            assert self.decoder is not None
            inputs = StaticInputs.like(prepared, self._slots, self.decoder, logits)
            self._buffers = (tokens, chosen, inputs)
        self._tokens, self._chosen, self._inputs = self._buffers
        self._inputs.copy_from(prepared)
        self._prompt = prepared.prompt_columns
        # Steps attend to whole buffers, with weight 0 to slots that aren't written: these must not hold an earlier NaN.
        layers: list[Any] = self.cache.layers
        for buffer in (buffer for layer in layers if layer.is_initialized for buffer in layer.buffers):
            buffer[:, :, self._prompt :].zero_()

    def run(self, i: int, tokens: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        """Run generated token i of each row, `tokens` [rows], through `layers`.

        Returns logits [rows, vocabulary], which the next step of as many layers and rows overwrites.
        """
        with torch.cuda.device_of(tokens):
            result = self._replay(i, layers, tokens, choosing=False)
        self._set_length(layers, i)
        logits: torch.Tensor = result[0]
        return logits

    def choose(
        self,
        i: int,
        tokens: torch.Tensor,
        layers: Sequence[Sequence[int]],
        room: Sequence[float],
        ends: Collection[int],
        padding: Any,
    ) -> torch.Tensor:
        """Decode several steps greedily, from generated token i on. Returns token ids [rows, new tokens].

        A GPU starts the next steps before the host sees the tokens of earlier ones, so that it never waits. Decoding
        stops early where every sequence has ended, or so many that the batch should shrink.

        Args:
            tokens: those of the first step [rows].
            layers: those that run in each step, of MAX_AHEAD steps at most.
            room, ends, padding: as in `skipdecode.generate.decode_loop.Runner.choose`.
        """
        rows = len(tokens)
        ahead = steps_in_flight(tokens.device)
        counts = [None if limit > 0 else 0 for limit in room]  # new tokens of the sequences that have ended
        marks: list[torch.cuda.Event | None] = []
        done = looked_at = 0

        def look(until: int) -> None:
            nonlocal looked_at
            for n in range(looked_at, until):
                mark = marks[n]
                if mark is not None:
                    mark.synchronize()
                for row, token in enumerate(self._seen[n, :rows].tolist()):
                    if counts[row] is None and (token in ends or n + 1 >= room[row]):
                        counts[row] = n + 1
            looked_at = max(looked_at, until)

        with torch.cuda.device_of(tokens):
            for n, of_step in enumerate(layers):
                self._replay(i + n, of_step, tokens if n == 0 else None, choosing=True)
                self._seen[n, :rows].copy_(self._chosen[i + n], non_blocking=True)
                marks.append(_mark(tokens.device))
                done = n + 1
                look(done - ahead)
                unfinished = [count is None for count in counts]
                if not any(unfinished) or (ends and rows_to_keep(unfinished, powers_of_two=True) is not None):
                    break
            look(done)
        for n in range(done):
            if n + 1 == done or layers[n] is not layers[n + 1]:
                self._set_length(layers[n], i + n)
        found = [done if count is None else count for count in counts]
        new = self._seen[: max(found), :rows].T.clone()  # [rows, new tokens]
        if padding is not None and min(found) < new.shape[1]:
            padding = int(padding)
            for row, count in enumerate(found):
                new[row, count:] = padding
        result: torch.Tensor = new.to(tokens.device)
        return result

    def keep_rows(self, rows: Sequence[int], prepared: PreparedInputs) -> None:
        """Keep only `rows`, in their order, until the next `start`; they move to the first rows of the buffers."""
        count = len(rows)
        self.cache.keep_rows(rows)
        self._tokens, self._chosen = self._tokens[:count], self._chosen[:, :count]
        self._inputs = self._inputs.first_rows(count)
        self._inputs.copy_from(prepared)

    @property
    def device(self) -> torch.device:
        """The device of the buffers; the CPU before they are allocated."""
        return torch.device("cpu") if self._buffers is None else self._buffers[0].device

    def _set_length(self, layers: Sequence[int], i: int) -> None:
        for layer in layers:
            self.cache.layers[layer].length = self._prompt + i + 1  # type: ignore[union-attr]

    def _replay(
        self, i: int, layers: Sequence[int], tokens: torch.Tensor | None, *, choosing: bool
    ) -> list[torch.Tensor]:
        """Run a step on `tokens`; None for those that the step before chose."""
        key = (layers, len(self._tokens), choosing)
        if key not in self._graphs:
            tokens = self._tokens.clone() if tokens is None else tokens
            self._graphs[key] = self._capture(layers, choosing, functools.partial(self._set_step, i, tokens))
        if tokens is not None:
            self._set_step(i, tokens)
        replay, result = self._graphs[key]
        replay()
        return result

    def _set_step(self, i: int, tokens: torch.Tensor) -> None:
        self._tokens.copy_(tokens)
        self._inputs.move_to(i, self._prompt + i)

    def _capture(
        self, layers: Sequence[int], choosing: bool, set_step: Callable[[], None]
    ) -> tuple[Replay, list[torch.Tensor]]:
        """A function that runs a step of `layers`, and a list with its logits, empty where it chooses tokens."""
        result: list[torch.Tensor] = []
        tokens, chosen, inputs = self._tokens, self._chosen, self._inputs

        def forward() -> None:
            assert self.decoder is not None
            gpu_layers = inputs.layers_for(len(tokens))
            inputs.look_up(self.decoder.dtype, masked=gpu_layers is None)
            logits = self.decoder(tokens, layers, self.cache, inputs, gpu_layers)
            if choosing:  # the next graph may reuse the memory of the logits
                tokens.copy_(logits.argmax(dim=-1))
                chosen.index_copy_(0, inputs.step_at, tokens[None])
                inputs.advance()
            else:
                result[:] = [logits]

        return self._recorder.record(forward, tokens.device, set_step), result


def steps_in_flight(device: torch.device) -> int:
    """How many steps run on the device before the host sees the tokens of an earlier one."""
    return STEPS_IN_FLIGHT if device.type == "cuda" else 0


def _mark(device: torch.device) -> "torch.cuda.Event | None":
    """An event that a GPU reaches when it has done all work so far; None for a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


_KEEPING = threading.Lock()


def step_graphs(
    decoder: FastDecoder, schedule: SkipSchedule, steps: int, shape: tuple[int, int, bool], *, keep: bool
) -> StepGraphs:
    """The graphs for a generation of one shape, those of an earlier call where it kept them.

    Only this call uses them until `keep_step_graphs`, so that two threads never write into the same buffers.

    Args:
        shape: the number of rows, the padded prompt length, and whether no row is padded.
        keep: whether a later call may use them; it may not where the caller gets the cache.
    """
    rows, columns, full = shape
    columns = -(-columns // PROMPT_GRAIN) * PROMPT_GRAIN
    if not keep:
        return StepGraphs(decoder, schedule, steps, columns)
    # Buffers made in inference mode can't be written to outside of it, and graphs are captured under torch's settings
    # for matrix products.
    settings = (getattr(torch.backends.cuda.matmul, name) for name in PRODUCTS)
    key = (schedule, steps, rows, columns, full, torch.is_inference_mode_enabled(), *settings)
    with _KEEPING:
        found: StepGraphs | None = decoder.kept_graphs.pop(key, None)
        if found is None:
            _drop_all_but(decoder.kept_graphs, MAX_KEPT - 1)
    if found is None:
        found = StepGraphs(decoder, schedule, steps, columns)
        found.key = key
    found.decoder = decoder
    found.cache.reset()  # type: ignore[no-untyped-call]
    if found.free is not None:  # another thread's steps may still run, on a stream of its own
        torch.cuda.current_stream(found.device).wait_event(found.free)
    return found


def keep_step_graphs(decoder: FastDecoder, graphs: StepGraphs) -> None:
    """Keep the graphs of a generation that has ended without an error for the next call of the same shape."""
    if graphs.key is not None:
        graphs.decoder = None
        graphs.free = _mark(graphs.device)
        with _KEEPING:
            decoder.kept_graphs[graphs.key] = graphs
            decoder.kept_graphs.move_to_end(graphs.key)
            _drop_all_but(decoder.kept_graphs, MAX_KEPT)


def _drop_all_but(kept: OrderedDict[Any, StepGraphs], count: int) -> None:
    """Drop the least recently used until at most `count` are left and their caches fit."""
    held = [graphs.cache.nbytes for graphs in kept.values()]
    device = next((graphs.device for graphs in kept.values()), torch.device("cpu"))
    room = MAX_KEPT_MEMORY * torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else math.inf
    while len(held) > count or (len(held) > 1 and sum(held) > room):
        kept.popitem(last=False)
        held.pop(0)
