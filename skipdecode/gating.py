"""Attaching a schedule to a model: each layer runs on the columns that the schedule gives it, and on no other.

One mechanism serves teacher forcing, prefill and decoding. For the time of a context, every call of a decoder layer
goes through a gate that knows how many of the columns at hand the layer runs: all, a prefix (law 3), or none. What a
layer doesn't run passes by unchanged. No model code is copied, no module is added, no key of the state dict changes.

The gate stands before the layer's `__call__`, in a subclass that the layer is an instance of while the context lasts
(PyTorch's FSDP2 does the same). There it is outside of gradient checkpointing, which may run the layer's `forward`
again after the context, and outside of hooks, so that ZeRO-3 gathers no parameters of a layer that is passed by.

Which gate a call obeys is said by the thread that calls, in a context variable. A model that several threads use at
once is attached once for all of them; a thread that attached nothing runs every layer on every column.
"""

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from skipdecode.errors import ConfigError, check_counts
from skipdecode.families import decoder_layers
from skipdecode.internals import captured_outputs, is_replica
from skipdecode.schedule.cost import depth_mismatch
from skipdecode.schedule.schedule import SkipSchedule

# columns at hand -> for each layer, how many of them it runs, counted from the first
PositionPlan = Callable[[int], tuple[int, ...]]


def all_positions(num_layers: int, layers: tuple[int, ...]) -> PositionPlan:
    """The plan in which `layers` run every column and the others none: prefill, and a step of decoding."""
    active = frozenset(layers)
    on = tuple(int(layer in active) for layer in range(num_layers))
    return functools.lru_cache(maxsize=2)(lambda columns: tuple(columns * flag for flag in on))


class LayerGate:
    """Says to every layer of one attached model how many columns it runs, and counts what was run.

    Args:
        layers: of the model, bottom first.
        plan, keep_in_graph, stopped: as the attributes.

    Attributes:
        plan: what the next forward pass obeys.
        keep_in_graph: whether a layer without columns runs the first one for nothing, so that it gets a gradient: 0.
        stopped: for each layer, how many of the first columns stop below it: they give it keys and values, and pass by
            unchanged. None where there are none.
        layer_positions: layer-columns run so far (a batch of any size counts as one), those for nothing left out.
        layer_positions_skipped: layer-columns passed by so far.
    """

    def __init__(
        self,
        layers: nn.ModuleList,
        plan: PositionPlan,
        *,
        keep_in_graph: bool = False,
        stopped: Sequence[int] | None = None,
    ) -> None:
        self.plan = plan
        self.keep_in_graph = keep_in_graph
        self.stopped = stopped
        self.layer_positions = 0
        self.layer_positions_skipped = 0
        self.index_of: dict[nn.Module, int] = {layer: index for index, layer in enumerate(layers)}
        self._returns_tuple = False  # as layer 0, which always runs, last answered

    @contextmanager
    def active(self) -> Iterator[None]:
        """While it lasts, the layers that this thread calls obey this gate."""
        token = _OBEYED.set((*_OBEYED.get(), self))
        try:
            yield
        finally:
            _OBEYED.reset(token)

    def call(self, layer: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `layer`, whose own call is `run`, on the columns that it runs."""
        names = None if args and not args[1:] else _argument_names(layer)  # GPT-2 passes some by position
        hidden_states, args = (args[0], args[1:]) if args else (kwargs.pop(names[0]), args)  # type: ignore[index]
        columns = hidden_states.shape[1]  # hidden_states: [batch, columns, hidden]
        cutoff = self.plan(columns)[self.index_of[layer]]
        self.layer_positions += cutoff
        self.layer_positions_skipped += columns - cutoff
        stop = min(self.stopped[self.index_of[layer]], cutoff) if self.stopped is not None else 0
        if cutoff == columns and not stop:
            output = run(hidden_states, *args, **kwargs)
            self._returns_tuple = isinstance(output, tuple)
            return output
        _refuse_captured_outputs(kwargs)
        for_nothing = cutoff == 0 and self.keep_in_graph and torch.is_grad_enabled()
        if cutoff == 0 and not for_nothing:
            return (hidden_states,) if self._returns_tuple else hidden_states
        kwargs.update(zip(names[1:] if names else (), args, strict=False))
        if for_nothing:
            cutoff = 1
            # The first column sees itself alone; in a row that is padded there, the mask would let it see nothing.
            kwargs.update({name: None for name in ("attention_mask", "causal_mask") if name in kwargs})
        if cutoff < columns:
            kwargs = {name: _first_columns(name, value, cutoff, columns) for name, value in kwargs.items()}
        output = run(hidden_states[:, :cutoff], **kwargs)
        prefix, rest = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
        if for_nothing:
            prefix = hidden_states[:, :cutoff] + 0.0 * prefix
        # [batch, stop, hidden], then cutoff - stop and columns - cutoff more columns -> [batch, columns, hidden]
        whole = torch.cat([hidden_states[:, :stop], prefix[:, stop:], hidden_states[:, cutoff:]], dim=1)
        return whole if rest is None else (whole, *rest)


# The gates that the layers called here obey: a thread, and a task of asyncio, has its own.
_OBEYED: ContextVar[tuple[LayerGate, ...]] = ContextVar("obeyed_gates", default=())
# layer -> how many contexts, of all threads, have attached it
_ATTACHED: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_ATTACHING = threading.Lock()


@functools.cache
def _gated_class(layer_class: Any) -> Any:
    """The layer's class with a gate before its call, for a call that has one to obey."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(layer_class.__call__, self)
        for gate in _OBEYED.get():
            if self in gate.index_of:
                return gate.call(self, run, args, kwargs)
        if is_replica(self):  # the threads of DataParallel know of no context
            raise ConfigError("DataParallel runs copies that no schedule reaches: start a process a device (torchrun)")
        return run(*args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        """Copies and pickles of the layer are of its own class."""
        _, _, *state = layer_class.__reduce_ex__(self, protocol)
        return (object.__new__, (layer_class,), *state)

    body = {"__call__": call, "__reduce_ex__": reduce, "__module__": layer_class.__module__}
    gated: Any = type(layer_class.__name__, (layer_class,), body)
    # transformers wraps `forward` of every new subclass for checkpointing; the outermost wrapper alone checkpoints.
    # The recomputation may come when the layer has its own class again, so the wrapper must be that of its own class.
    if "forward" in vars(gated):
        del gated.forward
    return gated


def _argument_names(layer: Any) -> list[str]:
    return list(inspect.signature(layer.forward).parameters)


def _refuse_captured_outputs(kwargs: dict[str, Any]) -> None:
    """Raise ConfigError where hidden states or attentions are to be handed out, of which each layer has to give one."""
    wanted = captured_outputs() & {"hidden_states", "attentions"}
    if kwargs.get("output_attentions"):  # BLOOM hands it down
        wanted.add("attentions")
    if wanted:
        raise ConfigError(
            f"output_{min(wanted)} is asked for under a schedule that skips: a layer that is passed by, or runs some "
            "columns alone, has none to give for the others"
        )


def _first_columns(name: str, value: Any, cutoff: int, columns: int) -> Any:
    """An argument of a layer, cut to the first `cutoff` columns where it has a dimension of columns."""
    if name in ("past_key_values", "past_key_value", "layer_past") and value is not None:
        if value.get_seq_length() > columns:
            raise ConfigError("skip_layers runs whole sequences: pass no past_key_values that already holds tokens")
        return value
    if name in ("attention_mask", "causal_mask") and value is not None:
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"a {type(value).__name__} can't be cut to a prefix of columns: "
                "load the model with attn_implementation='sdpa' or 'eager'"
            )
        # [batch, 1, queries, keys], or [batch, keys] (flash attention)
        return value[..., :cutoff, :cutoff] if value.dim() == 4 else value[:, :cutoff]
    if name in ("position_ids", "cache_position", "alibi") and value is not None:
        return value[..., :cutoff]  # [batch, columns], [columns], or [batch * heads, 1, columns]
    if name == "position_embeddings" and value is not None:
        return tuple(part[..., :cutoff, :] for part in value)  # cos and sin: [batch, columns, head_dim]
    return value


def check_schedule(schedule: SkipSchedule, layers: nn.ModuleList) -> None:
    """Raise ConfigError unless `schedule` was made for as many layers as there are."""
    if not isinstance(schedule, SkipSchedule):
        raise ConfigError(f"schedule is a {type(schedule).__name__}: pass a SkipSchedule, such as solve_schedule gives")
    if schedule.num_layers != len(layers):
        raise ConfigError(depth_mismatch(schedule, len(layers)))


def check_not_attached(layers: Iterable[nn.Module]) -> None:
    """Raise ConfigError where this thread has attached a schedule to one of the layers."""
    if (obeyed := _OBEYED.get()) and any(layer in gate.index_of for gate in obeyed for layer in layers):
        raise ConfigError("a schedule is attached to this model already: leave the first skip_layers before the next")


@contextmanager
def gated_layers(
    model: nn.Module,
    schedule: SkipSchedule,
    plan: PositionPlan,
    *,
    prompt_columns: int,
    keep_in_graph: bool = False,
) -> Iterator[LayerGate]:
    """Put every decoder layer of `model` behind a gate that obeys `plan`, and take the gate away at the end.

    Of `prompt_columns` those that stop below a layer are the schedule's.

    Yields the gate; passes within its `active()` go through it.
    """
    layers = decoder_layers(model)
    check_schedule(schedule, layers)
    stopped = schedule.stopped_positions(prompt_columns) if schedule.stopped_layers else None
    gate = LayerGate(layers, plan, keep_in_graph=keep_in_graph, stopped=stopped)
    check_not_attached(layers)
    with _ATTACHING:
        for layer in gate.index_of:
            if not _ATTACHED.get(layer):
                layer_class: Any = type(layer)
                layer.__class__ = _gated_class(layer_class)
            _ATTACHED[layer] = _ATTACHED.get(layer, 0) + 1
    try:
        yield gate
    finally:
        with _ATTACHING:
            for layer in gate.index_of:
                _ATTACHED[layer] -= 1
                if not _ATTACHED[layer]:
                    layer.__class__ = type(layer).__bases__[0]


@contextmanager
def skip_layers(
    model: nn.Module, schedule: SkipSchedule, *, prompt_columns: int, keep_in_graph: bool = False
) -> Iterator[LayerGate]:
    """Teacher forcing under a schedule: layer l of `model` runs the first c(l) columns of a batch alone (law 3).

    The batch must be laid out in columns: prompts padded on the left to `prompt_columns`, completions starting in
    column `prompt_columns`, padded on the right. Columns of a prompt that stops (`SkipSchedule.prompt_stop`) pass by
    the layers above unchanged; these run on them all the same, for their keys and values, so training gets no cheaper
    by it. Works with gradient checkpointing, peft-wrapped models and inference mode. It holds for the thread that
    enters it: another one that uses the model meanwhile runs every layer.

    Args:
        model: a causal language model of transformers, wrapped or not.
        schedule: which layers each generated token runs.
        prompt_columns: how many columns, from the left, belong to the prompt; column `prompt_columns + i` holds
            generated token i.
        keep_in_graph: whether a layer that the schedule gives no column still gets a gradient, of zeros. While
            gradients are enabled it then runs the first column, times 0. What trains in several processes needs it
            (DDP waits for every gradient, ZeRO-3 would apply the last step's again); without it such a layer's
            gradients are None. With prompts at full depth every layer has columns, and nothing changes.

    Yields:
        The gate, which counts the layer-columns that were run.

    Raises:
        ConfigError: for a schedule of another depth, a family that isn't known, or a model that this thread has
            attached already; in a forward pass, for fewer columns than the prompt's, and where hidden states or
            attentions are asked for.
    """
    check_counts(prompt_columns=prompt_columns)

    @functools.lru_cache(maxsize=8)
    def plan(columns: int) -> tuple[int, ...]:
        return schedule.position_cutoffs(prompt_columns, columns)

    how: Any = {"prompt_columns": prompt_columns, "keep_in_graph": keep_in_graph}
    with gated_layers(model, schedule, plan, **how) as gate, gate.active():
        yield gate
