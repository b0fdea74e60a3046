"""What a training step holds in memory at each moment, found by running it on tensors without data."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from data.columns import lay_out
from skipdecode import SkipSchedule, skip_layers
from skipdecode.families import text_config, unwrap
from train.exits import Exits, run_exits
from train.objective import Objective, unpack_batch

Kernels = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class SimulatedStep:
    """The bytes that one process holds in a training step, beside its optimiser's state.

    Attributes:
        parameters, trainable: of the model, and those of them that get a gradient.
        hidden_size: of its decoder.
        weights, gradients: bytes of all of them, with no share of them elsewhere.
        peaks: bytes of gradients -> the most bytes of anything else (activations, temporary tensors) while there were
            as many. Gradients come in the backward pass as activations go, so the two don't peak together.
    """

    parameters: int
    trainable: int
    hidden_size: int
    weights: int
    gradients: int
    peaks: Mapping[int, int]

    @property
    def activations(self) -> int:
        """The most bytes that are neither weights nor gradients."""
        return max(self.peaks.values())

    def peak(self, gradient_share: float = 1.0) -> int:
        """The most bytes of activations and gradients at once, in a process that keeps a share of each gradient."""
        return max(other + int(gradient_share * gradients) for gradients, other in self.peaks.items())


@dataclass(frozen=True)
class StepSettings:
    """What a training step runs on one device.

    Attributes:
        schedules: those of the step, slowest first, as `ScheduleSampler.at` gives them.
        rows, prompt_columns, new_tokens: the batch.
        autocast: the type that autocast computes in; None computes in that of the weights.
        accumulated: whether the gradients of earlier batches are there when the step starts.
        objective: whose loss it is.
        kernels: whose: those of CUDA keep one byte for each value that dropout sees, those of the CPU four.
    """

    schedules: tuple[SkipSchedule, ...]
    rows: int
    prompt_columns: int
    new_tokens: int
    autocast: torch.dtype | None = None
    accumulated: bool = False
    objective: Objective = field(default_factory=Objective)
    kernels: Kernels = "cuda"


def simulate_step(model: torch.nn.Module, steps: Sequence[StepSettings]) -> SimulatedStep:
    """Run training steps of a model without allocating a byte, and take the most that any of them holds.

    The model's own code runs, under its schedules and with the objective's own losses, on tensors that have a shape
    and no data (`FakeTensorMode`): billions of parameters take seconds. What a kernel allocates within itself isn't
    seen.

    Args:
        model: as it trains, with adapters, frozen weights and gradient checkpointing where it has them, made on the
            meta device. It can't be used afterwards.
        steps: what is run.
    """
    live = LiveBytes()
    with FakeTensorMode(), live:
        _leave_meta(model)
        model.train()
        parameters = list(model.parameters())  # a tied one once
        live.start(parameters)
        for step in steps:
            with _fused_dropout() if step.kernels == "cuda" else nullcontext():
                for _ in range(2 if step.accumulated else 1):
                    _forward_and_backward(model, step)
            model.zero_grad()
    trainable = [p for p in parameters if p.requires_grad]
    return SimulatedStep(
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in trainable),
        hidden_size=text_config(unwrap(model).config).hidden_size,
        weights=sum(p.nbytes for p in parameters),
        gradients=sum(p.nbytes for p in trainable),
        peaks=live.peaks,
    )


def _leave_meta(model: torch.nn.Module) -> None:
    """Put a fake tensor of the CPU in the place of every one on the meta device: its kernels are those that run."""
    made: dict[int, torch.Tensor] = {}  # a tied one once

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            made[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    for module in model.modules():
        for own in (module._parameters, module._buffers):
            tensors = cast(dict[str, torch.Tensor | None], own)
            tensors.update({name: fake(tensor) for name, tensor in tensors.items() if tensor is not None})


@dataclass
class _Held:
    """A storage's bytes, and whether they are a gradient."""

    size: int
    gradient: bool = False


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of each storage that an operation makes, until nothing refers to it any more."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own lacks annotations
        self.live = 0  # beside weights
        self.gradients = 0  # among them
        self.peaks: dict[int, int] = {}
        self._held: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._hold(value.untyped_storage())
        return result

    def start(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Count from here on: what there is by now is weights."""
        self.live, self.gradients, self.peaks = 0, 0, {}
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._mark_gradient)

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if storage in self._held:
            return  # a view, or an operation in place
        held = _Held(storage.nbytes())
        self._held[storage] = held
        weakref.finalize(storage, self._release, held)
        self.live += held.size
        self._note()

    def _release(self, held: _Held) -> None:
        self.live -= held.size
        self.gradients -= held.size * held.gradient

    def _mark_gradient(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        held = self._held[parameter.grad.untyped_storage()]
        self.gradients += held.size * (not held.gradient)
        held.gradient = True
        self._note()

    def _note(self) -> None:
        other = self.live - self.gradients
        self.peaks[self.gradients] = max(self.peaks.get(self.gradients, 0), other)


def _forward_and_backward(model: torch.nn.Module, step: StepSettings) -> None:
    """A step of `SkipTrainer`, without the figures for the log, which need data."""
    completion = [[0] * step.new_tokens] * step.rows
    batch = lay_out([[0] * step.prompt_columns] * step.rows, completion, pad_token=0)
    prompt_columns, columns, labels = unpack_batch(batch)

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", step.autocast) if step.autocast is not None else nullcontext()

    def run_all(**changes: Any) -> torch.Tensor:
        with autocast():
            logits: torch.Tensor = model(**{**columns, **changes}).logits
        return logits.float() if step.autocast is not None else logits  # as accelerate does

    def run(schedule: SkipSchedule, **changes: Any) -> torch.Tensor:
        with skip_layers(model, schedule, prompt_columns=prompt_columns):
            return run_all(**changes)

    def every_exit(schedule: SkipSchedule) -> Exits:
        return run_exits(model, lambda: run(schedule, logits_to_keep=1), step.new_tokens, autocast)

    for loss in step.objective.shares(step.schedules, labels, run, torch.no_grad()(run_all), every_exit):
        loss.backward()


@contextmanager
def _fused_dropout() -> Iterator[None]:
    """Dropout as CUDA computes it: it keeps a mask of one byte a value, the CPU a factor of four.

    The function is replaced, since a mode that stands before it isn't seen where checkpointing runs a layer again.
    """
    original = functional.dropout

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p else input

    functional.dropout = dropout
    try:
        yield
    finally:
        functional.dropout = original
