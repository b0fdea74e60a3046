"""The memory of a training step, found by running it on tensors without data."""

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModelForCausalLM, PretrainedConfig

from skipdecode import SkipSchedule
from skipdecode.families import unwrap
from skipdecode.training.batch_layout import lay_out
from skipdecode.training.step import step_losses
from train.build import as_it_trains
from train.dry_run.four_bit_linear import FourBitLinear, store_in_four_bits
from train.objective import recipe_objective
from train.recipe import Recipe

PRECISIONS = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class SimulatedStep:
    """The memory that one process needs in a training step, besides the optimiser's state.

    Attributes:
        parameters: number of the model's parameters.
        trainable: number of parameters with a gradient.
        four_bit: number of parameters that are stored in 4 bits.
        weights: bytes of all weights, unsharded.
        gradients: bytes of all gradients, unsharded.
        peaks: for each number of bytes of gradients, the peak bytes of everything else (activations, temporary tensors)
            while it held. Gradients appear in the backward pass as activations are freed, so their peaks differ in
            time.
    """

    parameters: int
    trainable: int
    weights: int
    gradients: int
    peaks: Mapping[int, int]
    four_bit: int = 0

    def peak(self, gradient_share: float = 1.0) -> int:
        """Peak bytes of activations and gradients together, in a process that keeps a share of each gradient."""
        return max(other + int(gradient_share * gradients) for gradients, other in self.peaks.items())


def simulate_step(
    recipe: Recipe,
    config: PretrainedConfig,
    schedules: Sequence[SkipSchedule],
    *,
    prompt_columns: int,
    new_tokens: int,
) -> SimulatedStep:
    """Run a recipe's training step on one device without allocating memory; billions of parameters take seconds.

    The model's code and the objective run on tensors that have a shape but no data (`FakeTensorMode`), with CPU
    kernels, whose dropout stores more than CUDA's. Memory that a kernel allocates internally isn't counted.

    Args:
        recipe: the recipe of the run.
        config: the config of its model, from `train.build.model_config`.
        schedules: the schedules of the step, slowest first, as `ScheduleSampler.at` orders them.
        prompt_columns: length of the longest prompt, in tokens.
        new_tokens: length of the longest completion, in tokens.
    """
    rows, precision = recipe.train.per_device_batch_size, PRECISIONS[recipe.train.precision]
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    if recipe.deepspeed.config is not None:  # DeepSpeed computes in the weights' data type
        dtype, precision = precision or dtype, None

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", precision) if precision is not None else nullcontext()

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype)
        base.name_or_path = recipe.model.name_or_path or ""  # needed for adapters that aren't merged
        if recipe.model.quantize is not None:
            store_in_four_bits(base)
        model = as_it_trains(base, recipe)
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        model.to_empty(device="cpu")  # so that CPU kernels run
        unwrap(model).tie_weights()
        if precision is not None:  # as accelerate does
            model.forward = convert_outputs_to_fp32(torch.autocast("cpu", precision)(model.forward))
        model.train()
        parameters = list(model.parameters())  # tied ones once
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        live.start(trainable, accumulated=recipe.train.gradient_accumulation_steps > 1)
        batch = lay_out([[0] * prompt_columns] * rows, [[0] * new_tokens] * rows, pad_token=0)
        for loss in step_losses(model, batch, schedules, recipe_objective(recipe.optim), autocast=autocast):
            loss.backward()
    packed = [module for module in model.modules() if isinstance(module, FourBitLinear)]
    four_bit = sum(module.in_features * module.out_features for module in packed)
    return SimulatedStep(
        parameters=sum(p.numel() for p in parameters) - sum(module.weight.numel() for module in packed) + four_bit,
        trainable=sum(p.numel() for p in trainable),
        weights=sum(p.nbytes for p in parameters),
        gradients=sum(p.nbytes for p in trainable),
        peaks=live.peaks,
        four_bit=four_bit,
    )


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage that an operation creates, until the storage is freed.

    Attributes:
        live: bytes other than weights and gradients.
        gradients: bytes of gradients, which are counted when they appear and then freed.
        peaks: see `SimulatedStep`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own lacks annotations
        self.live = self.gradients = 0
        self.peaks: dict[int, int] = {}
        self._known: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage not in self._known:  # views and in-place operations reuse a storage
                    self._known[storage] = True
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._release, storage.nbytes())
        self.peaks[self.gradients] = max(self.peaks.get(self.gradients, 0), self.live)
        return result

    def start(self, trainable: Sequence[torch.nn.Parameter], *, accumulated: bool) -> None:
        """Start to count, once the weights exist; with gradient accumulation all gradients exist too."""
        total = sum(parameter.nbytes for parameter in trainable)
        self.live, self.gradients, self.peaks = 0, total if accumulated else 0, {}

        def count_and_free(parameter: torch.Tensor) -> None:
            parameter.grad = None
            self.gradients = min(total, self.gradients + parameter.nbytes)  # a second pass adds to the same gradients

        for parameter in trainable:
            parameter.register_post_accumulate_grad_hook(count_and_free)

    def _release(self, size: int) -> None:
        self.live -= size
