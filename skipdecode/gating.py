"""Attach a schedule to a model: each layer runs only on the positions that the schedule assigns to it.

One mechanism serves teacher forcing, prefill and decoding. Within a context, every call of a decoder layer goes through
a gate that knows how many of the positions the layer runs: all, a prefix, or none. The hidden states of the other
positions pass through unchanged. No model code is copied, no module is added, and the state dict keeps its keys.

The gate wraps the layer's `__call__` in a subclass, which is the layer's class within the context (PyTorch's FSDP2 does
the same). So it is outside of gradient checkpointing, which may run the layer's `forward` again after the context, and
outside of hooks, so that ZeRO-3 doesn't gather the parameters of a skipped layer.

The active gate is a context variable, so each thread has its own: several threads may use one model at once with
different schedules, and a thread without a schedule runs every layer on every position.
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

from skipdecode.errors import ConfigError, check_counts, renamed
from skipdecode.families import decoder_layers
from skipdecode.internals import captured_outputs, is_replica
from skipdecode.schedule.cost import depth_mismatch
from skipdecode.schedule.schedule import SkipSchedule

# number of positions of a forward pass -> for each layer, how many of them, from the first on, it runs
PositionPlan = Callable[[int], tuple[int, ...]]


def all_positions(num_layers: int, layers: tuple[int, ...]) -> PositionPlan:
    """The plan in which `layers` run every position and the other layers none, for a prefill or a decode step."""
    active = frozenset(layers)
    flags = tuple(int(layer in active) for layer in range(num_layers))
    return functools.lru_cache(maxsize=2)(lambda positions: tuple(positions * flag for flag in flags))


class LayerGate:
    """Runs each layer of a model on the positions of a plan, and counts them.

    Attributes:
        plan: the plan of the next forward pass.
        keep_in_graph: whether a layer that runs no position still gets a gradient, of zeros.
        stopped: for each layer, how many of the first positions stop below it: they give it keys and values, and their
            hidden states pass through unchanged. None where there are none.
        layer_positions: number of (layer, position) pairs run so far, where a batch of any size counts as one position.
        layer_positions_skipped: number of (layer, position) pairs skipped so far.
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
        self._returns_tuple = False  # whether layer 0, which always runs, last returned a tuple

    layer_columns = renamed("layer_columns", "layer_positions")
    layer_columns_skipped = renamed("layer_columns_skipped", "layer_positions_skipped")

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the context, layers called by this thread go through this gate."""
        token = _ACTIVE.set((*_ACTIVE.get(), self))
        try:
            yield
        finally:
            _ACTIVE.reset(token)

    def call(self, layer: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `layer` through its original call, `run`, on the positions that it runs."""
        names = None if args and not args[1:] else _argument_names(layer)  # GPT-2 passes some by position
        hidden_states, args = (args[0], args[1:]) if args else (kwargs.pop(names[0]), args)  # type: ignore[index]
        positions = hidden_states.shape[1]  # hidden_states: [batch, positions, hidden]
        cutoff = self.plan(positions)[self.index_of[layer]]
        self.layer_positions += cutoff
        self.layer_positions_skipped += positions - cutoff
        stop = min(self.stopped[self.index_of[layer]], cutoff) if self.stopped is not None else 0
        if cutoff == positions and not stop:
            output = run(hidden_states, *args, **kwargs)
            self._returns_tuple = isinstance(output, tuple)
            return output
        _refuse_captured_outputs(kwargs)
        gradient_only = cutoff == 0 and self.keep_in_graph and torch.is_grad_enabled()
        if cutoff == 0 and not gradient_only:
            return (hidden_states,) if self._returns_tuple else hidden_states
        kwargs.update(zip(names[1:] if names else (), args, strict=False))
        if gradient_only:
            cutoff = 1
            # The first position attends to itself only. Where it is padding, the mask would exclude even that.
            kwargs.update({name: None for name in ("attention_mask", "causal_mask") if name in kwargs})
        if cutoff < positions:
            kwargs = {name: _first_positions(name, value, cutoff, positions) for name, value in kwargs.items()}
        output = run(hidden_states[:, :cutoff], **kwargs)
        prefix, rest = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
        if gradient_only:
            prefix = hidden_states[:, :cutoff] + 0.0 * prefix
        # stop, cutoff - stop, and positions - cutoff positions -> [batch, positions, hidden]
        joined = torch.cat([hidden_states[:, :stop], prefix[:, stop:], hidden_states[:, cutoff:]], dim=1)
        return joined if rest is None else (joined, *rest)


# The gates that are active here; each thread and each asyncio task has its own.
_ACTIVE: ContextVar[tuple[LayerGate, ...]] = ContextVar("active_gates", default=())
# layer -> the number of contexts, in all threads, that it is attached in
_ATTACHED: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_ATTACHING = threading.Lock()


@functools.cache
def _gated_class(layer_class: Any) -> Any:
    """A subclass of the layer's class whose calls go through the active gate, if there is one."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(layer_class.__call__, self)
        for gate in _ACTIVE.get():
            if self in gate.index_of:
                return gate.call(self, run, args, kwargs)
        if is_replica(self):  # DataParallel's threads don't inherit the context
            raise ConfigError(
                "DataParallel runs copies of the model, which skip no layers: start one process per device (torchrun)"
            )
        return run(*args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        """Give copies and pickles of the layer its original class."""
        _, _, *state = layer_class.__reduce_ex__(self, protocol)
        return (object.__new__, (layer_class,), *state)

    body = {"__call__": call, "__reduce_ex__": reduce, "__module__": layer_class.__module__}
    gated: Any = type(layer_class.__name__, (layer_class,), body)
    # transformers wraps `forward` of every new subclass for gradient checkpointing. Only the outermost wrapper
    # checkpoints, and it must be the original class's: the recomputation may happen after the context.
    if "forward" in vars(gated):
        del gated.forward
    return gated


def _argument_names(layer: Any) -> list[str]:
    return list(inspect.signature(layer.forward).parameters)


def _refuse_captured_outputs(kwargs: dict[str, Any]) -> None:
    """Raise ConfigError where hidden states or attentions of every layer and position are requested."""
    wanted = captured_outputs() & {"hidden_states", "attentions"}
    if kwargs.get("output_attentions"):  # BLOOM passes it as an argument
        wanted.add("attentions")
    if wanted:
        raise ConfigError(
            f"output_{min(wanted)} can't be combined with a schedule that skips layers: a skipped layer has no such "
            "output"
        )


def _first_positions(name: str, value: Any, cutoff: int, positions: int) -> Any:
    """An argument of a layer, cut to the first `cutoff` positions where it has a dimension of positions."""
    if name in ("past_key_values", "past_key_value", "layer_past") and value is not None:
        if value.get_seq_length() > positions:
            raise ConfigError("skip_layers runs complete sequences: past_key_values must not contain tokens already")
        return value
    if name in ("attention_mask", "causal_mask") and value is not None:
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"the attention mask is a {type(value).__name__}, which can't be cut to a prefix of positions: "
                "load the model with attn_implementation='sdpa' or 'eager'"
            )
        # [batch, 1, queries, keys], or [batch, keys] (flash attention)
        return value[..., :cutoff, :cutoff] if value.dim() == 4 else value[:, :cutoff]
    if name in ("position_ids", "cache_position", "alibi") and value is not None:
        return value[..., :cutoff]  # [batch, positions], [positions], or [batch * heads, 1, positions]
    if name == "position_embeddings" and value is not None:
        return tuple(part[..., :cutoff, :] for part in value)  # cos and sin: [batch, positions, head_dim]
    return value


def check_schedule(schedule: SkipSchedule, layers: nn.ModuleList) -> None:
    """Raise ConfigError unless `schedule` is a schedule for this number of layers."""
    if not isinstance(schedule, SkipSchedule):
        raise ConfigError(f"schedule is a {type(schedule).__name__}: pass a SkipSchedule, for example solve_schedule's")
    if schedule.num_layers != len(layers):
        raise ConfigError(depth_mismatch(schedule, len(layers)))


def check_not_attached(layers: Iterable[nn.Module]) -> None:
    """Raise ConfigError where this thread has already attached a schedule to one of the layers."""
    if (active := _ACTIVE.get()) and any(layer in gate.index_of for gate in active for layer in layers):
        raise ConfigError(
            "a schedule is already attached to this model: leave the skip_layers context before entering another"
        )


@contextmanager
def gated_layers(
    model: nn.Module,
    schedule: SkipSchedule,
    plan: PositionPlan,
    *,
    prompt_columns: int,
    keep_in_graph: bool = False,
) -> Iterator[LayerGate]:
    """Within the context, route every call of the model's decoder layers through a gate, while the gate is `active`.

    The schedule's `prompt_stop` applies whatever the plan, which is the gate's first one. Raises ConfigError as
    `skip_layers` does when it is entered.
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
    """Run forward passes of `model` under a schedule, with teacher forcing, within this context.

    The positions that run a layer are a prefix of the sequence (`SkipSchedule.position_cutoffs`), so the layer runs on
    that prefix only, and a training step gets cheaper. This needs prompts that are padded on the left to
    `prompt_columns`, and completions that start at position `prompt_columns` and are padded on the right.

    Where the prompt stops (`SkipSchedule.prompt_stop`), the layers above still run on its positions, for their keys and
    values, but leave their hidden states unchanged, so training doesn't get cheaper by it. The context works with
    gradient checkpointing, peft-wrapped models and inference mode. It applies to the thread that enters it; other
    threads run every layer.

    Args:
        model: a causal language model of transformers, wrapped or not.
        schedule: which layers each generated token runs.
        prompt_columns: number of positions, from the left, that belong to the prompt; position `prompt_columns + i`
            holds generated token i.
        keep_in_graph: whether a layer that runs no position still gets a gradient, of zeros. To that end it runs the
            first position, multiplied by 0, while gradients are enabled. Training in several processes needs this: DDP
            waits for every gradient, and ZeRO-3 would apply the last step's gradient again. Without it the gradients of
            such a layer are None. With prompt="full" every layer runs some positions, and the option has no effect.

    Yields:
        The gate, which counts the (layer, position) pairs that were run.

    Raises:
        ConfigError: for a schedule of another number of layers, a family that isn't known, or a model that this thread
            has already attached; in a forward pass, for fewer positions than the prompt's, and where hidden states or
            attentions are requested.
    """
    check_counts(prompt_columns=prompt_columns)

    @functools.lru_cache(maxsize=8)
    def plan(positions: int) -> tuple[int, ...]:
        return schedule.position_cutoffs(prompt_columns, positions)

    how: Any = {"prompt_columns": prompt_columns, "keep_in_graph": keep_in_graph}
    with gated_layers(model, schedule, plan, **how) as gate, gate.active():
        yield gate
