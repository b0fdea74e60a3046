"""What a recipe needs of a device's memory, before it is started."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from skipdecode import ConfigError
from skipdecode.errors import first_line
from train.adapters import add_adapters
from train.build import checkpoint_activations
from train.distributed import read_deepspeed
from train.dry_run.simulation import Kernels, SimulatedStep, StepSettings, simulate_step
from train.objective import Objective
from train.recipe import Recipe
from train.sampling import Draw, ScheduleSampler

# DeepSpeed's own defaults, in values.
REDUCE_BUCKET = 500_000_000
LIVE_PARAMETERS = 1_000_000_000

AUTOCAST = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes. `total` is no sum: gradients come as activations go.

    Attributes:
        weights: of a device; with ZeRO-3, its shard and the whole parameters that are in use at a time.
        gradients: of a device, with the buffers in which they are averaged over processes.
        optimiser: of a device: the two moments, and with DeepSpeed the weights in float32.
        activations: of a device, at their peak: all that is neither of the above.
        total: of a device, at its peak. The CUDA context, a library's workspaces and what the allocator can't use are
            not in it.
        host: of a machine's own memory, where DeepSpeed offloads to it.
    """

    weights: int
    gradients: int
    optimiser: int
    activations: int
    total: int
    host: int = 0


@dataclass(frozen=True)
class Zero:
    """What a DeepSpeed config shares out over the processes, and what it keeps in the host's memory.

    Attributes:
        stage: 0 shares nothing; 1 the optimiser's state, 2 gradients too, 3 weights too.
        offload_optimiser, offload_parameters: whether they are in the host's memory.
        reduce_bucket: values that are averaged over processes at a time; None: the hidden size squared, as
            transformers puts for "auto".
        reduce_buckets: how many of them there are: two where communication overlaps.
        live_parameters: values of the most parameters that are whole on a device at a time, at stage 3.
    """

    stage: int
    offload_optimiser: bool = False
    offload_parameters: bool = False
    reduce_bucket: int | None = REDUCE_BUCKET
    reduce_buckets: int = 1
    live_parameters: int = LIVE_PARAMETERS

    @classmethod
    def read(cls, name: str) -> "Zero":
        """From a name in configs/deepspeed/, or a JSON file. Raises ConfigError where there is none."""
        values = read_deepspeed(name)["zero_optimization"]
        try:
            bucket = values.get("reduce_bucket_size", REDUCE_BUCKET)
            live = values.get("stage3_max_live_parameters", LIVE_PARAMETERS)
            return cls(
                stage=values["stage"],
                offload_optimiser=values.get("offload_optimizer", {}).get("device", "none") != "none",
                offload_parameters=values.get("offload_param", {}).get("device", "none") != "none",
                reduce_bucket=None if bucket == "auto" else int(bucket),
                reduce_buckets=2 if values.get("overlap_comm", values["stage"] == 3) else 1,
                live_parameters=LIVE_PARAMETERS if live == "auto" else int(live),
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"deepspeed.config {name!r} can't be read: {first_line(error)}") from error


def costliest_steps(sampler: ScheduleSampler, distils: bool) -> list[tuple[Draw, ...]]:
    """The steps that may be drawn of which one holds the most memory.

    The slowest one; where a step that skips is also compared with full depth, the slowest of those as well.
    """
    rated = zip(sampler.speedups, sampler.schedules, sampler.weights, strict=True)
    draws = sorted((Draw(s, schedule), weight) for s, schedule, weight in rated)
    if sampler.sampling == "sandwich":
        inner = [draw for draw, weight in draws[1:-1] if weight > 0][:1]
        ends = [draw for draw, _ in (draws[:1] + draws[1:][-1:])]
        return [tuple(sorted(ends + inner, key=lambda draw: draw.speedup))]
    drawn = [draw for draw, weight in draws if weight > 0]
    skipping = [draw for draw in drawn[1:] if draw.schedule.min_layers < draw.schedule.num_layers] if distils else []
    return [(drawn[0],), *((draw,) for draw in skipping[:1])]


def simulate_recipe(
    recipe: Recipe,
    config: PretrainedConfig,
    steps: list[tuple[Draw, ...]],
    *,
    prompt_columns: int,
    new_tokens: int,
    rows: int | None = None,
    kernels: Kernels = "cuda",
) -> SimulatedStep:
    """What the costliest of `steps` holds on one device, in the recipe's batches of rows as long as is given.

    Args:
        config: of the recipe's model (`train.build.model_config`).
        steps: schedules, as `costliest_steps` gives them.
        prompt_columns, new_tokens: the lengths of the longest prompt and of the longest completion, in tokens.
        rows: of a batch; None: as many as the recipe says.
        kernels: of which device.
    """
    precision = AUTOCAST[recipe.train.precision]
    with_deepspeed = recipe.deepspeed.config is not None
    settings = [
        StepSettings(
            schedules=tuple(draw.schedule for draw in draws),
            rows=rows or recipe.train.per_device_batch_size,
            prompt_columns=prompt_columns,
            new_tokens=new_tokens,
            autocast=None if with_deepspeed else precision,
            accumulated=recipe.train.gradient_accumulation_steps > 1,
            objective=Objective.of(recipe.optim),
            kernels=kernels,
        )
        for draws in steps
    ]
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    return simulate_step(
        _model_without_data(recipe, config, (precision if with_deepspeed else None) or dtype), settings
    )


def _model_without_data(recipe: Recipe, config: PretrainedConfig, dtype: torch.dtype) -> torch.nn.Module:
    """The recipe's model as it trains, on the meta device."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if recipe.train.gradient_checkpointing:
            checkpoint_activations(model)
        adapted: torch.nn.Module = add_adapters(model, recipe.lora)
        return adapted


def estimate_memory(
    recipe: Recipe, simulated: SimulatedStep, world_size: int = 1, *, zero: Zero | None = None
) -> MemoryEstimate:
    """The memory that a recipe needs on each of `world_size` devices, all of them of one machine.

    Without DeepSpeed in one process `total` is the simulated peak itself, with the optimiser's state of AdamW: two
    values for each that is trained. Several processes hold the gradients a second time, in the buckets in which
    DistributedDataParallel averages them.

    With DeepSpeed the same simulated course of gradients and activations is taken, with the share of the gradients that
    the stage leaves on a device, on top of what doesn't change over a step: weights (2 bytes a value in bf16 and fp16),
    float32 weights and moments (12), buckets, and at stage 3 as many whole parameters as DeepSpeed lets live at a time,
    which is the most and not what every step needs. The step of the optimiser holds the gradients in float32 as well.

    Args:
        recipe: of which precision and DeepSpeed count here.
        simulated: as `simulate_recipe` gives it.
        world_size: processes, one a device.
        zero: instead of the config that the recipe names.
    """
    if zero is None and recipe.deepspeed.config is not None:
        zero = Zero.read(recipe.deepspeed.config)
    if zero is None:
        moments = 2 * simulated.gradients  # of the gradients' own type
        buckets = simulated.gradients if world_size > 1 else 0
        return MemoryEstimate(
            weights=simulated.weights,
            gradients=simulated.gradients + buckets,
            optimiser=moments,
            activations=simulated.activations,
            total=simulated.weights + moments + buckets + simulated.peak(),
        )
    return _with_zero(simulated, zero, world_size)


def _with_zero(simulated: SimulatedStep, zero: Zero, world_size: int) -> MemoryEstimate:
    shard = 1 / world_size
    trainable, value_bytes = simulated.trainable, simulated.weights // simulated.parameters
    # Averaged in buckets, then kept: whole, or the device's shard, or on the host.
    share = (0 if zero.offload_optimiser else shard) if zero.stage >= 2 else 1.0
    bucket = simulated.hidden_size**2 if zero.reduce_bucket is None else zero.reduce_bucket
    buckets = value_bytes * zero.reduce_buckets * min(trainable, bucket) if zero.stage >= 1 else 0
    state_shard = shard if zero.stage >= 1 else 1.0
    optimiser = int(12 * trainable * state_shard)
    in_float32 = int(4 * trainable * state_shard)  # the gradients, while the optimiser steps
    weights, host = simulated.weights, 0
    if zero.stage == 3:
        weights = 0 if zero.offload_parameters else int(simulated.weights * shard)
        host += simulated.weights if zero.offload_parameters else 0
        whole = min(simulated.parameters, zero.live_parameters) * value_bytes
        weights = min(simulated.weights, weights + whole) if world_size > 1 or zero.offload_parameters else weights
    if zero.offload_optimiser:
        host += 16 * trainable  # the float32 gradients are there too
        optimiser = in_float32 = 0
    gradients = int(simulated.gradients * share)
    return MemoryEstimate(
        weights=weights,
        gradients=gradients + buckets,
        optimiser=optimiser,
        activations=simulated.activations,
        total=weights + optimiser + max(buckets + simulated.peak(share), gradients + in_float32),
        host=host,
    )
